"""A CUDA device that is not there: its tensors hold CPU values, and it refuses what CUDA
refuses: tensors of two devices in one operation, a view as a numpy array, a generator of
another device, layouts that a kernel does not take."""

import importlib
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")
A = torch.ops.aten
MOVES = A._to_copy.default, A.copy_.default  # may read one device and write another
INDEXED = A.index.Tensor, A.index_put_.default, A._index_put_impl_.default
CONTIGUOUS = A.native_group_norm.default, A.native_group_norm_backward.default


class Pretended(torch.Tensor):
    "A tensor that says it lives on CUDA."

    @staticmethod
    def __new__(cls, value):
        how = dict(strides=value.stride(), dtype=value.dtype, device="cpu")
        made = torch.Tensor._make_wrapper_subclass(
            cls, value.shape, requires_grad=value.requires_grad, **how
        )
        made.value = value
        return made

    device = property(lambda self: CUDA)  # for autograd it lives on the CPU
    is_cuda, is_cpu = property(lambda self: True), property(lambda self: False)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:
            return CUDA
        with Device():
            return func(*args, **(kwargs or {}))

    def __repr__(self):
        return f"Pretended({self.value!r})"

    def tolist(self):
        return self.value.tolist()

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            copied = Pretended(self.value.detach().clone())
            memo[id(self)] = copied.requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        with away():  # a file holds the values
            return self.value.detach().clone().__reduce_ex__(protocol)

    def new_tensor(self, data):
        return torch.tensor(data, dtype=self.dtype, device=CUDA)

    def data_ptr(self):
        return self.value.data_ptr()


def _value(x):
    return x.value if isinstance(x, Pretended) else x


def _check(func, tensors, device):
    "Refuse what CUDA refuses."
    here = [t for t in tensors if isinstance(t, Pretended)]
    there = [t for t in tensors if not isinstance(t, Pretended) and t.ndim]
    if func in INDEXED and isinstance(tensors[0], Pretended):
        there = [t for t in there if t is tensors[-1] and func is not A.index.Tensor]
    if func not in MOVES and there and (here or device == CUDA):
        raise RuntimeError(
            f"{func}: Expected all tensors to be on the same device, but found at least"
            " two devices, cuda:0 and cpu!"
        )
    if func in CONTIGUOUS and here and not here[0].is_contiguous():
        raise RuntimeError(
            f"{func}: Expected X.is_contiguous(memory_format) to be true"
        )


class Here(Executor):
    "An executor in this thread: what keeps the devices apart is of one thread."

    def __init__(self, workers):
        pass

    def submit(self, call, *args):
        done = Future()
        done.set_result(call(*args))
        return done


class Device(TorchDispatchMode):
    "Keeps the two devices apart."

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.ops.prim.device.default:
            return CUDA if isinstance(args[0], Pretended) else args[0].device
        flat, spec = tree_flatten((args, kwargs))
        tensors = [x for x in flat if isinstance(x, torch.Tensor)]
        asked = kwargs.get("device")
        asked = None if asked is None else torch.device(asked)
        target = asked or next((CUDA for t in tensors if isinstance(t, Pretended)), CPU)
        target = CUDA if target.type == "cuda" else target
        _check(func, tensors, target)
        args, kwargs = tree_unflatten([_value(x) for x in flat], spec)
        if asked is not None:
            kwargs["device"] = CPU if asked.type == "cuda" else asked
        out = func(*args, **kwargs)
        if func._schema.name.split(".")[0][-1] == "_" or "out" in kwargs:
            return flat[0] if "out" not in kwargs else kwargs["out"]
        if target != CUDA:
            return out
        return tree_map(lambda x: Pretended(x) if type(x) is torch.Tensor else x, out)


GENERATORS = {}
FACTORIES = (
    "arange empty eye full linspace ones rand randn randperm tensor zeros".split()
)


def _made(factory):
    "A factory whose tensors are moved, since torch would look for a driver."

    def make(*args, device=None, generator=None, **kwargs):
        kind = torch.device(device or "cpu").type
        if generator is not None:
            if (id(generator) in GENERATORS) != (kind == "cuda"):
                raise RuntimeError(f"Expected a generator of device {device}")
            kwargs["generator"] = generator
        made = factory(*args, device=None if kind == "cuda" else device, **kwargs)
        return made.to(CUDA) if kind == "cuda" else made

    return make


def _moved(real):
    "`Module.to` for a device whose tensors no parameter of the CPU can hold."

    def to(self, *args, **kwargs):
        places = [a for a in args if isinstance(a, (str, torch.device))]
        where = torch.device((places or [kwargs.get("device") or "cpu"])[0])
        if where.type != "cuda":
            there = any(isinstance(p, Pretended) for p in self.parameters())
            return self if there else real(self, *args, **kwargs)
        moved = {}  # tied parameters stay tied
        for part in self.modules():
            for held in (part._parameters, part._buffers):
                for name, t in held.items():
                    if t is not None and id(t) not in moved:
                        new = t.detach().to(CUDA)
                        moved[id(t)] = new.requires_grad_(t.requires_grad)
                    held[name] = moved.get(id(t))
        return self

    return to


def _sent(real):
    "`Tensor.to` for tensors of a device that C++ knows nothing of."

    def to(self, *args, **kwargs):
        kwargs = {k: v for k, v in kwargs.items() if k not in ("copy", "non_blocking")}
        there, kind = kwargs.get("device"), kwargs.get("dtype")
        for given in args:
            if isinstance(given, torch.Tensor):
                there, kind = given.device, given.dtype
            elif isinstance(given, torch.dtype):
                kind = given
            elif isinstance(given, (str, torch.device)):
                there = given
        there = self.device if there is None else torch.device(there)
        if there.type == self.device.type:
            return real(self, kind or self.dtype)
        return A._to_copy.default(self, dtype=kind or self.dtype, device=there)

    return to


def away():
    "The CPU as it is, in the midst of it all."
    return _disable_current_modes()


@contextmanager
def cuda():
    "A machine with one pretended GPU."
    importlib.import_module("torch._dynamo")  # before the names it reads are patched
    torch._C._ensureCUDADeviceGuardSet()  # as for fake tensors: guards do nothing
    real = torch.Generator

    def generator(device="cpu"):
        made = real("cpu")
        if torch.device(device).type == "cuda":
            GENERATORS[id(made)] = made
        return made

    makers = {name: _made(getattr(torch, name)) for name in FACTORIES}
    with (
        mock.patch.multiple(torch, Generator=generator, **makers),
        mock.patch.object(torch.nn.Module, "to", _moved(torch.nn.Module.to)),
        mock.patch.object(torch.Tensor, "to", _sent(torch.Tensor.to)),
        mock.patch.object(torch.Tensor, "cpu", lambda self: self.to(CPU)),
        mock.patch("torch.cuda._lazy_init", lambda: None),
        mock.patch("torch.cuda.get_device_capability", lambda device=0: (9, 0)),
        mock.patch("torch.backends.cudnn.is_acceptable", lambda tensor: False),
        mock.patch("torch.cuda.mem_get_info", lambda device=0: (2**34, 2**34)),
        mock.patch("torch.cuda.memory_reserved", lambda device=0: 0),
        mock.patch("torch.cuda.get_rng_state", lambda device=0: torch.get_rng_state()),
        mock.patch("torch.cuda.set_rng_state", lambda state, device=0: None),
        mock.patch("torch.cuda.manual_seed_all", lambda seed: None),
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("torch.cuda.device_count", lambda: 1),
        Device(),
    ):
        yield
    GENERATORS.clear()
