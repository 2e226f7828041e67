"""Forty settings by dpcomm's accountants and by every public one that installs: dp_accounting,
Opacus, prv_accountant. Prints one line of JSON:
python benchmarks/accountants.py dp_accounting opacus --peer-python PYTHON
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path

import numpy as np
from scipy.special import ive

from dpcomm.privacy.losses import compose, gaussian_losses, listed_losses

CPU_LIMIT, MEMORY_LIMIT = 60, 12 * 2**30  # seconds and bytes of one answer
# group: name | parts (noise, its std over the clip, chance to take part, rounds) | delta.
# Cohorts are drawn by a coin for each client; one client joins or leaves.
FORTY = """
everyone: one round | gaussian 1.0 1.0 1 | 1e-05
everyone: 100 rounds | gaussian 5.0 1.0 100 | 1e-05
everyone: 10,000 rounds | gaussian 20.0 1.0 10000 | 1e-06
everyone: little noise | gaussian 0.5 1.0 10 | 1e-06
sampled: sigma 1.1, 60 epochs | gaussian 1.1 0.004266666666666667 14063 | 1e-05
sampled: sigma .8 | gaussian 0.8 0.01 1000 | 1e-05
sampled: sigma 1 | gaussian 1.0 0.01 10000 | 1e-06
sampled: sigma .6, rare | gaussian 0.6 0.001 1000 | 1e-05
sampled: sigma 2 | gaussian 2.0 0.05 10000 | 1e-06
sampled: sigma 3.8, a tenth | gaussian 3.8 0.1 1000 | 1e-05
sampled: sigma .5 | gaussian 0.5 0.01 200 | 1e-05
sampled: sigma 1.3 | gaussian 1.3 0.02 5000 | 1e-06
tiny delta: sigma 1, 1e-10 | gaussian 1.0 0.01 10000 | 1e-10
tiny delta: sigma 1, 1e-15 | gaussian 1.0 0.01 10000 | 1e-15
tiny delta: sigma 4, 1e-12 | gaussian 4.0 0.1 1000 | 1e-12
tiny delta: sigma .8, 1e-15 | gaussian 0.8 0.001 1000 | 1e-15
tiny delta: everyone, 1e-15 | gaussian 1.0 1.0 10 | 1e-15
tiny delta: sigma 2, 1e-15 | gaussian 2.0 0.001 100000 | 1e-15
tiny delta: sigma 10, 1e-12 | gaussian 10.0 0.01 10000 | 1e-12
tiny rate: q 1e-5, sigma .8 | gaussian 0.8 1e-05 1000000 | 1e-09
tiny rate: q 1e-5, sigma 1 | gaussian 1.0 1e-05 1000000 | 1e-09
tiny rate: q 1e-5, sigma 2 | gaussian 2.0 1e-05 1000000 | 1e-12
tiny rate: q 5e-5, sigma .7 | gaussian 0.7 5e-05 100000 | 1e-07
tiny rate: q 1e-4, sigma 1 | gaussian 1.0 0.0001 1000000 | 1e-09
tiny rate: q 1e-4, sigma .5 | gaussian 0.5 0.0001 100000 | 1e-08
tiny rate: q 1e-4, sigma 2 | gaussian 2.0 0.0001 1000000 | 1e-09
much noise: sigma 50 | gaussian 50.0 0.01 10000 | 1e-06
much noise: sigma 100 | gaussian 100.0 0.1 100000 | 1e-08
much noise: sigma 1000, everyone | gaussian 1000.0 1.0 1000000 | 1e-09
much noise: sigma 1000, half | gaussian 1000.0 0.5 100000 | 1e-06
lists: vote, then training | gaussian 5.0 1.0 1; gaussian 1.0 0.01 800 | 1e-06
lists: two noises | gaussian 1.0 0.1 500; gaussian 3.0 0.1 500 | 1e-05
lists: three phases | gaussian 1.2 0.01 1000; gaussian 1.0 0.02 500; gaussian 0.8 0.01 200 | 1e-05
lists: norms, then updates | gaussian 10.0 0.05 2000; gaussian 1.0 0.05 2000 | 1e-06
lists: a last round | gaussian 2.0 0.01 10000; gaussian 4.0 1.0 1 | 1e-06
whole numbers: discrete Gaussian, std 4 | discrete 4.0 1.0 10 | 1e-06
whole numbers: discrete Gaussian, std 20 | discrete 20.0 1.0 1000 | 1e-08
whole numbers: Skellam, std 4 | skellam 4.0 1.0 10 | 1e-06
whole numbers: Skellam, std 20 | skellam 20.0 1.0 1000 | 1e-08
whole numbers: discrete and continuous | discrete 10.0 1.0 100; gaussian 10.0 1.0 100 | 1e-06
"""


def setting(text):
    "Parts and delta of a line's end."
    releases, delta = text.split(" | ")
    parts = [part.split() for part in releases.split("; ")]
    parts = [(kind, float(std), float(q), int(n)) for kind, std, q, n in parts]
    return parts, float(delta)


LINES = [line.partition(" | ") for line in FORTY.strip().splitlines()]
SETTINGS = {name: setting(text) for name, _, text in LINES}


def ours(parts, delta):
    "Bracket of a list of releases; whole numbers are listed outcome by outcome."
    releases = []
    for kind, std, q, rounds in parts:
        if kind == "gaussian":
            release = gaussian_losses(std, q, sampling="poisson" if q < 1 else "none")
        else:
            k = np.arange(-math.ceil(35 * std), math.ceil(35 * std) + 1)
            bell = np.exp(-((k / std) ** 2) / 2)
            mass = bell if kind == "discrete" else ive(np.abs(k), std**2)
            mass = np.append(mass / mass.sum(), 0)
            how = dict(name=kind, relation="add-remove", trust="central")
            release = listed_losses(np.roll(mass, 1), mass, **how)
        releases.append((release, rounds))
    return compose(releases, delta)


def google_event(kind, std, q, rounds):
    import dp_accounting as dp

    if kind == "skellam":
        raise NotImplementedError("has no Skellam noise")
    gaussian = kind == "gaussian"
    event = dp.GaussianDpEvent(std) if gaussian else dp.ZCDpEvent(1 / (2 * std**2))
    event = dp.PoissonSampledDpEvent(q, event) if q < 1 else event
    return dp.SelfComposedDpEvent(event, rounds)


def google_rdp(parts, delta):
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    for part in parts:
        accountant.compose(google_event(*part))
    return accountant.get_epsilon(delta)


def google_pld(parts, delta):
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.pld import privacy_loss_distribution as pld

    if all(kind == "gaussian" for kind, *_ in parts):
        accountant = PLDAccountant()
        for part in parts:
            accountant.compose(google_event(*part))
        return accountant.get_epsilon(delta)
    total = pld.identity()
    for kind, std, q, rounds in parts:
        google_event(kind, std, q, rounds)  # refuses Skellam
        made = pld.from_gaussian_mechanism(std)
        if kind == "discrete":
            made = pld.from_discrete_gaussian_mechanism(std)
        total = total.compose(made.self_compose(rounds))
    return total.get_epsilon_for_delta(delta)


def gaussians(parts):
    "(std, q, rounds): Opacus and prv_accountant have nothing else."
    if any(kind != "gaussian" for kind, *_ in parts):
        raise NotImplementedError("has Gaussian noise only")
    return [tuple(part[1:]) for part in parts]


def opacus_rdp(parts, delta):
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = gaussians(parts)
    return accountant.get_epsilon(delta)


def opacus_prv(parts, delta):
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = gaussians(parts)
    return accountant.get_epsilon(delta)


def microsoft_prv(parts, delta):
    import prv_accountant as prv

    parts = gaussians(parts)
    made = [prv.PoissonSubsampledGaussianMechanism(q, std) for std, q, _ in parts]
    rounds = [n for _, _, n in parts]
    errors = dict(eps_error=0.01, delta_error=delta / 1000)  # those of Opacus
    accountant = prv.PRVAccountant(made, max_self_compositions=rounds, **errors)
    return accountant.compute_epsilon(delta, rounds)[2]


LIBRARIES = {
    "dp_accounting": {"RDP": google_rdp, "PLD": google_pld},
    "opacus": {"RDP": opacus_rdp, "PRV": opacus_prv},
    "prv_accountant": {"PRV": microsoft_prv},
}


def answer(call, parts, delta):
    "Epsilon, CPU seconds, and why there is none."
    start, eps, note = time.process_time(), None, ""
    try:
        with np.errstate(all="ignore"):
            eps = float(call(parts, delta))
        if not math.isfinite(eps):
            eps, note = None, f"says {eps}"
    except MemoryError:
        note = "runs out of memory"
    except NotImplementedError as why:
        note = str(why)
    except Exception as why:
        note = f"{type(why).__name__}: {str(why).splitlines()[0][:90]}"
    return dict(eps=eps, cpu=float(f"{time.process_time() - start:.3g}"), note=note)


def limited(call, parts, delta):
    "The answer of a process of its own, with limits on its time and memory."
    here, there = os.pipe()
    if not (child := os.fork()):
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT, CPU_LIMIT + 1))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
        with open(there, "w") as out:
            json.dump(answer(call, parts, delta), out)
            out.flush()
            os._exit(0)
    os.close(there)
    with open(here) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    late = dict(eps=None, cpu=None, note=f"no answer in {CPU_LIMIT} CPU seconds")
    return json.loads(text) if text else late


def print_answers(library):
    warnings.simplefilter("ignore")
    rows = [
        dict(setting=name, who=f"{library}, {kind}") | limited(call, *setting)
        for kind, call in LIBRARIES[library].items()
        for name, setting in SETTINGS.items()
    ]
    print(json.dumps(dict(version=version(library), rows=rows)))


def league(libraries, python):
    "Rows of all, and the versions of the libraries."
    rows, versions = [], {}
    for name, setting in SETTINGS.items():
        start = time.process_time()
        bracket = ours(*setting)
        cpu = float(f"{time.process_time() - start:.3g}")
        row = dict(setting=name, who="dpcomm", eps=bracket.eps, low=bracket.low)
        rows.append(row | dict(cpu=cpu, note=""))
    home = str(Path(__file__).resolve().parent.parent)
    paths = os.pathsep.join((home, os.environ.get("PYTHONPATH", "")))
    env = dict(os.environ, PYTHONPATH=paths, OMP_NUM_THREADS="1")
    for library in libraries:
        words = [python, __file__, library, "--answers"]
        done = subprocess.run(
            words, capture_output=True, text=True, check=True, env=env
        )
        told = json.loads(done.stdout.splitlines()[-1])
        rows += told["rows"]
        versions[f"{library}: {library}"] = told["version"]
    return rows, versions


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("libraries", nargs="*", choices=[[], *LIBRARIES])
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--answers", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answers:
        print_answers(args.libraries[0])
    else:
        from machine import print_record

        rows, versions = league(args.libraries, args.peer_python)
        print_record([], 1, league=rows, peers=versions)
