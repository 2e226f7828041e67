"""What must not change while the house loses half its weight. It leaves with that work.

    python tests/witness/witness.py check [SECTION ...]    compare with what was frozen
    python tests/witness/witness.py freeze [SECTION ...]   write anew; the commit says why

Sections: mechanisms, epsilons, grids, tables, rounds, smoke. Frozen at commit f99226b3.
"""

import inspect
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, is_dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[1] / "tests/mechanisms")]
os.environ.setdefault("MPLBACKEND", "Agg")


def plain(value):
    "Numbers to the last bit, everything else as JSON has it."
    if isinstance(value, dict):
        return {str(key): plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(v) for v in value]
    if is_dataclass(value):
        return plain(asdict(value))
    if isinstance(value, float):
        return value.hex()
    return (
        value if value is None or isinstance(value, (bool, int, str)) else repr(value)
    )


# The variants, named by what they are built from; d is 10.
def variants():
    from dpcomm.mechanisms import contract, mvu, topk  # noqa: F401

    names = {"Support": topk.Support, "Table": mvu.Table, "inf": math.inf, "topk": topk}
    for name in contract.registered():
        cls = contract.mechanism_class(name)
        names[cls.__name__] = cls
    listed = json.loads((HERE / "variants.json").read_text())
    return {label: eval(text, dict(names)) for label, text in listed.items()}


def mechanisms():
    "Representation, fingerprint, size, moments, bytes and decoded numbers of all variants."
    import torch

    from dpcomm.core.random import Insecure, seed_tree

    update = (
        torch.from_numpy(seed_tree(0, "golden").standard_normal(10).astype("f4")) / 4
    )
    result = {}
    for label, mechanism in variants().items():
        message = mechanism.encode(update, Insecure(0))
        cohort = mechanism.simulate(update.repeat(3, 1), seed_tree(0, "witness"))
        try:
            moments = [
                float(x) for m in mechanism.moments(update) for x in m.reshape(-1)
            ]
        except (AttributeError, IndexError, TypeError, ValueError):
            moments = None
        result[label] = dict(
            repr=repr(mechanism),
            fingerprint=mechanism.fingerprint,
            bits=asdict(mechanism.bits(10)),
            bytes=message.to_bytes().hex(),
            decoded=mechanism.decode(message).tolist(),
            simulated=cohort.reshape(-1).tolist(),
            moments=moments,
        )
    return result


ACCOUNTANTS = (
    "rdp-classic rdp-balle pld pld-exact exact-classic exact-balle pure theorem1-arxiv"
    " theorem1-iclr theorem1-iclr-shifted fisher-classic fisher-balle grid-classic"
    " grid-balle mixture-classic mixture-balle"
).split()


def epsilons():
    "Four deployments and the mechanisms' own accounts, of every variant."
    import dpcomm

    deployments = dict(
        poisson=dict(sampling="poisson"),
        fixed=dict(sampling="fixed"),
        secagg=dict(sampling="none", trust="secagg", n_clients=10),
        local=dict(sampling="none", trust="local", n_clients=10),
    )
    result = {}
    for label, mechanism in variants().items():
        groups = getattr(mechanism, "groups", None)
        for name, how in deployments.items():
            how = dict(n_clients=100, cohort=10, rounds=20, delta=1e-5, d=10) | how
            try:
                made = dpcomm.Deployment(**how, groups=groups).guarantee(mechanism)
            except ValueError:
                result[f"{label} | {name}"] = None
                continue
            told = "eps unit relation sampling accountant trust".split()
            result[f"{label} | {name}"] = [getattr(made, word) for word in told]
        for accountant in ACCOUNTANTS:
            how = dict(rounds=20, delta=1e-5, n_clients=100, cohort=10, d=10)
            takes = inspect.signature(mechanism.guarantee).parameters
            if not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
                how = {key: value for key, value in how.items() if key in takes}
            try:
                made = mechanism.guarantee(**how, accountant=accountant)
            except (ValueError, TypeError):
                continue
            result[f"{label} | {accountant}"] = [made.eps, made.relation, made.sampling]
    return result


EXPERIMENTS = (
    "dprec-ablations dprec-by-writer dprec-costs dprec-femnist dprec-gap dprec-indices"
    " dprec-mean dprec-mnist dprec-quantised dprec-shakespeare dprec-stackoverflow"
    " dprec-tight fltop-costs fltop-fmnist fltop-medical imvu-cifar10 imvu-femnist"
    " imvu-mnist sqsgd-emnist sqsgd-fmnist sqsgd-mnist frontier mean-estimation"
).split()
OF_A_LINE = "key name scale fills needs seeds data memory minutes trains".split()


def grids():
    "Every line of every experiment at every scale, in its order."
    from dpcomm.experiments.run.runs import find

    return {
        f"{name} {scale}": [
            {field: getattr(line, field) for field in OF_A_LINE}
            for line in find(name).grid(scale)
        ]
        for name in EXPERIMENTS
        for scale in ("smoke", "quick", "full")
    }


def tables():
    "What `dpcomm table` prints of the four papers, line by line."
    result = {}
    for paper in ("dprec", "imvu", "fltop", "sqsgd"):
        done = subprocess.run(
            [sys.executable, "-m", "dpcomm", "table", paper],
            capture_output=True,
            text=True,
            check=True,
            cwd=HERE.parents[1],
            env=os.environ | {"COLUMNS": "400"},
        )
        result[paper] = [line.rstrip() for line in done.stdout.splitlines()]
    return result


def rounds():
    "Two rounds of each engine on the embedded digits; weights to the last bit."
    import hashlib

    from dpcomm import mechanism
    from dpcomm.core.random import seed_tree
    from dpcomm.datasets import images
    from dpcomm.training import models
    from dpcomm.training.federated import Config, Task, simulate

    data = images.load("digits")
    result = {}
    for engine in ("loop", "fused", "vmap"):
        for name, how in (
            ("gaussian", dict(clip_norm=0.5, sigma=0.3, exact=False)),
            ("rec", dict(clip_norm=0.5, std=0.5, index_bits=5)),
        ):
            model = models.build("lenet5", seed_tree(0))
            parts = images.iid(400, 20, seed_tree(0, "split"))
            rules = dict(rounds=2, cohort=4, sampling="fixed", batch=20, lr=0.1)
            task = Task(
                model,
                images.Federation(data, parts, "iid"),
                mechanism(name, **how),
                Config(**rules, server="sgd", server_lr=1.0, engine=engine),
                seed=0,
            )
            w = simulate(task, progress=False).w
            result[f"{engine} {name}"] = [
                hashlib.sha256(w.numpy().tobytes()).hexdigest(),
                float(w.double().norm()),
            ]
    return result


SMOKE = [name for name in EXPERIMENTS if name not in ("frontier", "dprec-tight")]
TIMED = ("seconds", "cpu", "wall", "encode_ms", "decode_ms")


def untimed(value):
    "Without what a clock decides."
    if isinstance(value, dict):
        return {
            k: untimed(v) for k, v in value.items() if not any(t in k for t in TIMED)
        }
    return [untimed(v) for v in value] if isinstance(value, (list, tuple)) else value


def smoke():
    "Smoke records, without cost and origin: configurations, numbers, cells, guarantees."
    from dpcomm.experiments.run import runs

    result = {}
    for name in SMOKE:
        with tempfile.TemporaryDirectory() as folder:
            for record in runs.run_grid(name, "smoke", out=folder, seeds=[0]):
                fields = asdict(record)
                for gone in ("cost", "origin", "sha256"):
                    fields.pop(gone, None)
                result[f"{name} {record.key} {record.seed}"] = untimed(fields)
    return result


SECTIONS = (mechanisms, epsilons, grids, tables, rounds, smoke)
SECTIONS = {section.__name__: section for section in SECTIONS}


def differences(frozen, now, path=""):
    "Where two nests of JSON differ."
    if isinstance(frozen, dict) and isinstance(now, dict):
        for key in sorted(frozen.keys() | now.keys()):
            yield from differences(frozen.get(key), now.get(key), f"{path}/{key}")
    elif isinstance(frozen, list) and isinstance(now, list) and len(frozen) == len(now):
        for i, pair in enumerate(zip(frozen, now)):
            yield from differences(*pair, f"{path}[{i}]")
    elif frozen != now:
        yield f"{path}: {str(frozen)[:200]} -> {str(now)[:200]}"


def main(verb, *names):
    wrong = 0
    for name in names or SECTIONS:
        file = HERE / f"{name}.json"
        now = plain(SECTIONS[name]())
        old = json.loads(file.read_text()) if file.exists() else {}
        if verb == "freeze":
            rows = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in now.items()]
            file.write_text("{\n" + ",\n".join(rows) + "\n}\n")
            continue
        lines = list(differences(old, now))
        wrong += len(lines)
        print(f"{name}: {len(lines) or 'no'} differences")
        print("\n".join(lines[:40]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
