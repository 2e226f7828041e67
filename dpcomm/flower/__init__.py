"""Flower: what a node answers. `server`, `sums` and `transport` hold the server's end."""

from ..interop.flower import Private, mod
from .client import Apart, Node, client_app, own_part

__all__ = ["Apart", "Node", "Private", "client_app", "mod", "own_part"]
