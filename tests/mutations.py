"""Mistakes that were made on purpose: `python tests/mutations.py` makes each in a copy of
the checkout, runs the tests of its room, and prints who noticed.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from checkout import ROOT, copy, settings


class Mutation(NamedTuple):
    "One mistake: a piece of text of one module, and what stands there instead."

    mistake: str
    module: str  # below dpcomm, without .py
    right: str  # stands there once
    wrong: str
    tests: str  # files below tests, whose first tier is run


MUTATIONS = [
    Mutation(*row)
    for row in (
        # privacy
        (
            "one round fewer is composed",
            "privacy/accounting",
            'return curve * int(check_between("rounds", rounds, 1, 2**53))',
            'return curve * max(1, int(check_between("rounds", rounds, 1, 2**53)) - 1)',
            "privacy/test_accounting.py",
        ),
        (
            "rounds compose as their root",
            "privacy/accounting",
            'return curve * int(check_between("rounds", rounds, 1, 2**53))',
            'return curve * int(check_between("rounds", rounds, 1, 2**53)) ** 0.5',
            "privacy/test_accounting.py",
        ),
        (
            "the Gaussian's Renyi divergence is 5 % too small",
            "privacy/accounting",
            "return _check_orders(orders) / (2 * _check_sigma(sigma) ** 2)",
            "return _check_orders(orders) / (2.1 * _check_sigma(sigma) ** 2)",
            "privacy/test_accounting.py",
        ),
        (
            "a conversion divides by the order, not by the order less 1",
            "privacy/accounting",
            "_conversion_gain(orders, conversion)) / (orders - 1)\n    eps =",
            "_conversion_gain(orders, conversion)) / orders\n    eps =",
            "privacy/test_accounting.py",
        ),
        (
            "sampling is 10 % rarer than it is",
            "privacy/accounting",
            "log_weight = mixture_weights((int(order),), np.log(q), np.log1p(-q))[0]",
            "log_weight = mixture_weights((int(order),), np.log(0.9 * q), np.log1p(-q))[0]",
            "privacy/test_accounting.py",
        ),
        (
            "a swapped client moves the sum by one clip, not two",
            "mechanisms/skellam",
            'swap = 1 + (relation == "replace")',
            "swap = 1",
            "mechanisms/test_skellam.py",
        ),
        (
            "tails of a loss distribution are not charged",
            "privacy/fixed_size_accountant",
            "left = delta - rdp_to_delta(ORDERS, curve, span)[0] - ROUNDING",
            "left = delta",
            "privacy/test_fixed_size_accountant.py",
        ),
        (
            "a known cohort's median counts as its most frequent client",
            "privacy/fixed_size_accountant",
            "binom.isf((1 - quantile) / n_clients,",
            "binom.isf((1 - quantile),",
            "privacy/test_fixed_size_accountant.py",
        ),
        (
            "the audit's interval misses a hundred times as often as it says",
            "privacy/audit",
            "betaincinv(np.maximum(k, 1), n - k + 1, alarm / 2)",
            "betaincinv(np.maximum(k, 1), n - k + 1, alarm * 50)",
            "privacy/test_audit.py",
        ),
        (
            "twice the delta is spent by composed losses",
            "privacy/composition",
            "left = 1 - infinite / plan.delta - room",
            "left = 2 - infinite / plan.delta - room",
            "privacy/test_losses.py",
        ),
        (
            "what composed losses leave outside their window is not charged",
            "privacy/composition",
            "room = weight * (outside + 2 * error * bins) + 8",
            "room = 8",
            "privacy/test_losses.py",
        ),
        (
            "DP-REC's losses stand a step too low",
            "privacy/rec_pairs",
            "OnGrid(i + np.arange(len(m))",
            "OnGrid(i - 1 + np.arange(len(m))",
            "privacy/test_rec_accountant.py",
        ),
        (
            "what leaves the circle of a lower end is not charged",
            "privacy/rec_pairs",
            "left = delta + wrapped + transform + rounds * lost",
            "left = delta + transform + rounds * lost",
            "privacy/test_rec_accountant.py",
        ),
        (
            "a step of DP-REC's ladder of norms is not paid",
            "privacy/rec_pairs",
            "chance = _reveal_chance(K, ratio**i, (1 + room) / ratio)",
            "chance = _reveal_chance(K, ratio**i, 1 + room)",
            "privacy/test_rec_accountant.py",
        ),
        (
            "one of several tests of an audit counts as the only one",
            "privacy/audit",
            "count_pvalue(caught, len(hot), false, len(cold), eps, delta)) * tests",
            "count_pvalue(caught, len(hot), false, len(cold), eps, delta))",
            "privacy/test_audit.py",
        ),
        (
            "nearly every client of a shuffle is a clone",
            "privacy/shuffling",
            "m, law = _binomial(n - 1, share := 2 / (2 + math.expm1(eps)))",
            "m, law = _binomial(n - 1, share := 1 - 1e-9)",
            "privacy/test_shuffling.py",
        ),
        # mechanisms
        (
            "a clip is .1 % too long",
            "core/vectors",
            "scale = (clip / norm.clamp_min(",
            "scale = (1.001 * clip / norm.clamp_min(",
            "mechanisms/test_conformance.py",
        ),
        (
            "SignSGD's law misses a factor of 1.06",
            "mechanisms/signsgd",
            "rare = bernoulli(ndtr(np.maximum(-np.abs(v), -FAR)), own)",
            "rare = bernoulli(ndtr(np.maximum(-1.06 * np.abs(v), -FAR)), own)",
            "mechanisms/test_signsgd.py",
        ),
        (
            "an exact coin decides a tie",
            "secagg/discrete",
            "return prefix < scaled if prefix != scaled or not rest else None",
            "return prefix < scaled",
            "secagg/test_ring.py mechanisms/test_exact_coins.py",
        ),
        (
            "a share of noise is a tenth too small",
            "mechanisms/distributed_noise",
            "return sigma * clip_norm / math.sqrt((1 - tolerance) * n_clients)",
            "return 0.9 * sigma * clip_norm / math.sqrt((1 - tolerance) * n_clients)",
            "mechanisms/test_distributed_noise.py mechanisms/test_skellam.py",
        ),
        (
            "one share of noise more may be missing",
            "mechanisms/distributed_noise",
            "return self.n_clients - math.floor(self.tolerance * self.n_clients + 1e-9)",
            "return self.n_clients - 1 - math.floor(self.tolerance * self.n_clients + 1e-9)",
            "mechanisms/test_distributed_noise.py secagg/test_recipes.py",
        ),
        (
            "the periodic factor of summed discrete noise is forgotten",
            "mechanisms/ddgauss",
            "shift**2 + gap * D / 2), shift + gap * math.sqrt(D))",
            "shift**2), shift)",
            "mechanisms/test_ddgauss.py",
        ),
        (
            "a rotation is undone with other signs",
            "mechanisms/sqsgd",
            "return (walsh_hadamard(x) * signs(seed, x.shape[-1]).to(x))[..., :count]",
            "return (walsh_hadamard(x) * signs(seed + 1, x.shape[-1]).to(x))[..., :count]",
            "mechanisms/test_sqsgd.py",
        ),
        (
            "a private level costs nothing for the rounding of floats",
            "mechanisms/privquant",
            'return (check_size("d", d) * (d + levels) + eps) * 2.0**-50',
            "return 0.0",
            "mechanisms/test_privquant.py mechanisms/test_exact_coins.py",
        ),
        (
            "the lie of randomised response is too rare",
            "mechanisms/sqkr",
            "return -math.expm1(-eps) / (1 + (letters - 1) * math.exp(-eps))",
            "return -math.expm1(-eps) / (1 + (letters - 2) * math.exp(-eps))",
            "mechanisms/test_sqkr.py",
        ),
        (
            "DP-REC decodes another candidate",
            "mechanisms/rec",
            "z = selected(sizes, seed, numbers, indices)",
            "z = selected(sizes, seed, numbers, indices ^ 1)",
            "mechanisms/test_rec.py",
        ),
        # wire
        (
            "a message's checksum is not read",
            "core/wire",
            'if zlib.crc32(data[:-4]) != struct.unpack("<I", data[-4:])[0]:',
            "if False:",
            "core/test_wire.py",
        ),
        (
            "a message of another version is read",
            "core/wire",
            "    if version != VERSION:\n",
            "    if False:\n",
            "core/test_wire.py",
        ),
        (
            "a vector of another length is taken",
            "core/wire",
            "    if announced != d:\n",
            "    if False:\n",
            "core/test_wire.py",
        ),
        (
            "a number one too large for its bits is packed",
            "core/wire",
            "0 <= values.min() and values.max() < 2**bits)",
            "0 <= values.min() and values.max() <= 2**bits)",
            "core/test_wire.py",
        ),
        (
            "shared randomness is not counted",
            "core/wire",
            "total = payload + header + shared_randomness",
            "total = payload + header",
            "core/test_wire.py mechanisms/test_contract.py",
        ),
        (
            "a swapped client moves a Skellam sum by one L1 norm, not two",
            "mechanisms/skellam",
            "curve = rdp_skellam(orders, mu, swap * delta2, swap * delta1)",
            "curve = rdp_skellam(orders, mu, swap * delta2, delta1)",
            "mechanisms/test_skellam.py",
        ),
        (
            "MVU's dithering pays once, whatever the rounds",
            "mechanisms/mvu",
            "slip, left = delta / (2 * rounds), delta / 2",
            "slip, left = delta / 2, delta / 2",
            "mechanisms/test_mvu.py",
        ),
        (
            "MVU's dithering has half its budget",
            "mechanisms/mvu",
            "likely = mean + h * (2 * reach + wide) * math.sqrt(-math.log(slip) / 2)",
            "likely = mean + h * (2 * reach + wide) * math.sqrt(-math.log(slip) / 8)",
            "mechanisms/test_mvu.py",
        ),
        (
            "a streaming server clips at eight times the clip",
            "mechanisms/central_noise",
            "return clip_to_grid(estimate[None], self.clip_norm, self.scale)[0]",
            "return clip_to_grid(estimate[None], 8 * self.clip_norm, self.scale)[0]",
            "mechanisms/test_distributed_noise.py",
        ),
        # rings and secure aggregation
        (
            "the centred lift of a ring is off by one",
            "secagg/ring",
            "& (self.modulus - 1)) - half",
            "& (self.modulus - 1)) - half + 1",
            "secagg/test_ring.py",
        ),
        (
            "a sum may leave the ring",
            "secagg/ring",
            "if need > self.ring.modulus // 2 - 1:",
            "if need > self.ring.modulus - 1:",
            "secagg/test_ring.py",
        ),
        (
            "both clients of a pair add their mask",
            "secagg/masking",
            "combine, step = np.subtract if negative else np.add,",
            "combine, step = np.add,",
            "secagg/test_sessions.py",
        ),
        (
            "one signature too few suffices",
            "secagg/server",
            "if len(signed) < setup.signatures:",
            "if len(signed) < setup.signatures - 1:",
            "secagg/test_sessions.py",
        ),
        (
            "a client answers with one signature too few",
            "secagg/client",
            "    if len(signed) < need:\n",
            "    if len(signed) < need - 1:\n",
            "secagg/test_sessions.py",
        ),
        (
            "a share that is not the committed one is used",
            "secagg/protocol",
            "return share_commitment(setup, owner, holder, kind, value, blind) == hashed",
            "return True",
            "secagg/test_sessions.py",
        ),
        (
            "a session goes on with one client too few",
            "secagg/protocol",
            "if len(alive) < setup.quorum:",
            "if len(alive) < setup.quorum - 1:",
            "secagg/test_sessions.py",
        ),
        (
            "a key that was seen before is accepted",
            "secagg/client",
            "        if key in seen:\n",
            "        if False:\n",
            "secagg/test_sessions.py",
        ),
        # engine
        (
            "the average divides by those who came",
            "training/federated_round",
            "return mechanism.average(total, cohort, rng).to(w), loss",
            "return mechanism.average(total, max(n, 1), rng).to(w), loss",
            "training/test_federated.py",
        ),
        (
            "a fixed cohort repeats clients",
            "training/task",
            'rng.choice(n_clients, cohort, replace=sampling == "replacement")',
            "rng.choice(n_clients, cohort, replace=True)",
            "training/test_federated.py",
        ),
        (
            "the first download is not paid",
            "training/run_state",
            "return min(history, model_bits) if replay else model_bits",
            "return min(history, model_bits) if replay else model_bits * (seen >= 0)",
            "training/test_federated.py",
        ),
        (
            "a node's floor counts one answer less",
            "training/floor",
            'return sum(p.name != SETTING and p.name[0] != "." for p in folder.iterdir())',
            'return sum(p.name[0] != "." for p in folder.iterdir()) - 2',
            "training/test_floor.py",
        ),
        (
            "Flower opens a sum with fewer shares than are counted on",
            "interop/sums",
            "quorum=max(mechanism.honest, threshold + 1, n // 2 + 1)",
            "quorum=max(threshold + 1, n // 2 + 1)",
            "flower/test_sums.py",
        ),
        (
            "a rate that is 10 % off is accepted",
            "training/promises",
            "math.isclose(promise.q, rate, rel_tol=1e-9)",
            "math.isclose(promise.q, rate, rel_tol=0.11)",
            "training/test_federated.py",
        ),
        (
            "a run may be one share of noise short",
            "training/promises",
            "if config.cohort < mechanism.honest:",
            "if config.cohort < mechanism.honest - 1:",
            "training/test_federated.py",
        ),
        (
            "the count of an adaptive clip is not paid",
            "training/adaptive_clip",
            "left = z / math.sqrt(1 - (z / (2 * std)) ** 2) * MARGIN",
            "left = z",
            "training/test_adaptive_clip.py",
        ),
        (
            "a count among the entries of a sum is not paid",
            "training/adaptive_clip",
            "return math.sqrt(1 - c * c / 4) / MARGIN, c / MARGIN",
            "return 1.0, c / MARGIN",
            "training/test_adaptive_clip.py",
        ),
        # records and verdicts
        (
            "a contradiction between records is kept silently",
            "evidence/records",
            "elif why := difference(twin, record):",
            "elif why := None:",
            "evidence/test_records.py",
        ),
        (
            "a match at one and a half tolerances",
            "evidence/verdicts",
            "inside = within_tolerance(abs(gap), cell.tol)",
            "inside = within_tolerance(abs(gap), 1.5 * cell.tol)",
            "evidence/test_verdicts.py",
        ),
        (
            "better and worse are exchanged",
            "evidence/verdicts",
            'return "above" if (gap > 0) == (cell.better != "lower") else "below"',
            'return "below" if (gap > 0) == (cell.better != "lower") else "above"',
            "evidence/test_verdicts.py",
        ),
        (
            "an interval is half as wide",
            "evidence/verdicts",
            "if within_tolerance(abs(gap) - half_width(cell, s), cell.tol):",
            "if within_tolerance(abs(gap) - half_width(cell, s) / 2, cell.tol):",
            "evidence/test_verdicts.py",
        ),
    )
]


def path_of(mutation, root=ROOT) -> Path:
    "The module in which a mistake is made."
    return root / "dpcomm" / f"{mutation.module}.py"


def first_failure(tests, root) -> str:
    "The first of some files' tests that fails in the checkout `root`, or ''."
    words = [*(f"tests/{name}" for name in tests.split()), "-n0", "-x", "-q"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=root,
        env=settings(root=root),
        capture_output=True,
        text=True,
    )
    found = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", done.stdout, re.MULTILINE)
    if done.returncode and not found:
        raise SystemExit(f"{tests} could not be run:\n{done.stdout}{done.stderr}")
    return found.group(1) if found else ""


def caught_by(mutation, root) -> str:
    "Make one mistake in the checkout `root`; the first test that fails, or ''."
    path = path_of(mutation, root)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutation.right, mutation.wrong), encoding="utf-8")
    try:
        return first_failure(mutation.tests, root)
    finally:
        path.write_text(text, encoding="utf-8")


def main():
    "Print a row a mistake; the exit status is how many nobody noticed."
    asked = sys.argv[1:]
    wanted = [m for m in MUTATIONS if not asked or any(w in m.mistake for w in asked)]
    with tempfile.TemporaryDirectory() as folder:
        root, missed = copy(Path(folder)), 0
        for tests in {mutation.tests for mutation in wanted}:
            if by := first_failure(tests, root):
                raise SystemExit(f"{by} fails without a mistake: mend it first")
        for mutation in wanted:
            by = caught_by(mutation, root)
            missed += not by
            print(
                f"| {mutation.mistake} | {by and f'`{by}`' or 'NOBODY'} |", flush=True
            )
    return missed


if __name__ == "__main__":
    raise SystemExit(main())
