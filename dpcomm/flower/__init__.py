"""Flower: `mod` and `Private` are two lines around your own app. The other names are the clients of
dpcomm's own server loop; `server`, `sums` and `transport` hold the server's end.
"""

from ..interop.flower import Private, mod
from .client import RemoteFederation, Node, client_app, own_part

__all__ = ["RemoteFederation", "Node", "Private", "client_app", "mod", "own_part"]
