"""Private, communication-efficient federated learning: mechanisms with their guarantees.

Begin with `registered` and `mechanism` (a mechanism by name), `Deployment` and `choose` (who
takes part, and which mechanism fits), `train` (a PyTorch module on clients' data), `compose`
(one guarantee for several releases) and `audit` (attacks). `help(dpcomm.train)` and so on say
shapes, units and errors; `dpcomm --help` is the command line.

Packages: core (vectors, random numbers, messages), privacy (accountants, audits), mechanisms,
training, secagg (secure aggregation), interop (other frameworks), datasets,
experiments and evidence (records, verdicts, figures). The notebook that a module is
exported from, named in its first lines, explains it.

Nothing is imported before it is asked for: `dpcomm.mechanism("gaussian", ...)` loads that
mechanism, and a program that reads a guarantee never loads torch.
"""

__version__ = "0.1.0"

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what editors and type checkers see of the names below
    from .core.wire import Bits, Message
    from .mechanisms.choose import choose
    from .mechanisms.contract import mechanism, registered
    from .mechanisms.deployments import Deployment
    from .privacy import audit
    from .privacy.guarantee import Guarantee
    from .privacy.losses import compose
    from .training.federated import Config, Task, simulate, train

_HOMES = {
    "mechanism": "mechanisms.contract",
    "registered": "mechanisms.contract",
    "Guarantee": "privacy.guarantee",
    "Bits": "core.wire",
    "Message": "core.wire",
    "simulate": "training.federated",
    "train": "training.federated",
    "Config": "training.federated",
    "Task": "training.federated",
    "Deployment": "mechanisms.deployments",
    "audit": "privacy.audit",
    "compose": "privacy.losses",
    "choose": "mechanisms.choose",
}
__all__ = [
    "Bits",
    "Config",
    "Deployment",
    "Guarantee",
    "Message",
    "Task",
    "audit",
    "choose",
    "compose",
    "mechanism",
    "registered",
    "simulate",
    "train",
]


def __getattr__(name):
    "Import one public name from the room it lives in."
    if name not in _HOMES:
        raise AttributeError(f"module 'dpcomm' has no attribute {name!r:.80}")
    home = import_module(f"dpcomm.{_HOMES[name]}")
    return home if name == "audit" else getattr(home, name)


def __dir__():
    return sorted([*globals(), *_HOMES])
