"""One bad argument at a time, for everything that a module exports and that runs in milliseconds.

A call may refuse its argument by a ValueError or TypeError that says in a sentence what is wrong, or accept it and return finite numbers.
GOOD holds a working call of every name; what has none stands in NOT_FUZZED with the reason, and a new name needs one or the other."""
import dataclasses
import importlib
import inspect
import math
import pkgutil
import re
import signal
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

import dpcomm
from dpcomm import audit, federated, ring, secagg, wire
from dpcomm.accounting import Guarantee, gaussian_guarantee
from dpcomm.core import seed_tree
from dpcomm.mechanisms import compressive, mvu, privquant, sqkr, topk

SECONDS = 4.0  # of processor time that one refusal, or one accepted call, may take

# ---- working calls

RNG = "a fresh stream"
ROW = torch.tensor([0.3, -0.2, 0.1, 0.25])
ROWS = torch.stack([ROW, -ROW])
MECHANISMS = {
    "compressive": dict(fraction=1.0, clip_norm=1.0, sigma=1.0, n_clients=10), "ddgauss": dict(clip_norm=1.0, sigma=1.0, n_clients=10),
    "gaussian": dict(clip_norm=1.0, sigma=1.0, local=True), "imvu": dict(clip_norm=1.0, eps=1.0), "mvu": dict(clip_norm=1.0, eps=1.0),
    "pm": dict(bound=1.0, eps=1.0), "privquant": dict(bound=1.0, levels=4, eps=3.0, rule="best"), "quantised": dict(clip_norm=1.0, sigma=1.0),
    "rec": dict(clip_norm=1.0, std=1.0, index_bits=2), "signsgd": dict(clip_norm=1.0, sigma=1.0), "skellam": dict(clip_norm=1.0, sigma=1.0, n_clients=10),
    "sqkr": dict(clip_norm=1.0, eps=1.0), "sqsgd": dict(bound=1.0, levels=2, eps=2.0, fraction=1.0, rule="best"),
    "topk": dict(fraction=1.0, clip_norm=1.0, sigma=1.0, n_clients=10), "vqsgd": dict(clip_norm=1.0, eps=1.0)}
MADE = {name: wire.mechanism(name, **given) for name, given in MECHANISMS.items()}
RUN = {"compressive": {}, "ddgauss": dict(d=4), "gaussian": {}, "quantised": {}, "skellam": dict(d=4), "topk": {}, "rec": dict(sampling="none", accountant="exact-balle")}
METHODS = {name: {  # class method -> arguments
    "clip": dict(u=ROWS), "simulate": dict(u=ROWS, rng=RNG), "moments": dict(u=ROWS), "bits": dict(d=4),
    "guarantee": dict(rounds=2, delta=1e-5) | RUN.get(name, {}),
    "curve": dict(relation=next(iter(made.relations)), eps=[0.5, 1.0]),
    "play": dict(relation=next(iter(made.relations)), present=True, n=3, rng=RNG)} for name, made in MADE.items()}

PLAN = compressive.plan(4, 1.0)
FRAME, TABLE, CAL = sqkr.frame(4), mvu.two_symbols(1.0), privquant.calibrate(4, 4, 3.0, "best")
SETUP = secagg.Setup(4, 3, ring.Ring(16), 2, session=bytes(16))
PROMISE = gaussian_guarantee(1.0, 1e-5)
SCORES = np.linspace(0, 1, 200)
LAW = [0.6, 0.4], [0.4, 0.6]
SMALL = dict(sigma=1.0, q=0.1, rounds=10, delta=1e-5)
DPREC = dict(c=1.0, slots=20, n_clients=10, K=8, groups=1, delta=1e-5)
SUM = dict(clip_norm=1.0, sigma=1.0, n_clients=10, tolerance=0.1)
GOOD = {
    "accounting": {
        "Guarantee": dict(eps=1.0, delta=1e-5, unit="client", relation="zero-out", sampling="none", accountant="x", scope="total", trust="central", note="n", premise="p", rounds=3, q=0.5),
        "rdp_gaussian": dict(orders=[2, 3], sigma=1.0), "rdp_subsampled_gaussian": dict(orders=[2, 3.5], sigma=1.0, q=0.1), "compose": dict(rdp=[0.1, 0.2], rounds=3),
        "rdp_to_eps": dict(orders=[2, 3], rdp=[0.1, 0.2], delta=1e-5, conversion="balle"), "rdp_to_delta": dict(orders=[2, 3], rdp=[0.1, 0.2], eps=1.0, conversion="balle"),
        "guarantee_from_rdp": dict(orders=[2, 3], rdp=[0.1, 0.2], delta=1e-5, conversion="balle", unit="client", relation="zero-out", sampling="none", scope="total", trust="central"),
        "gaussian_delta": dict(sigma=1.0, eps=1.0, rounds=2),
        "gaussian_guarantee": SMALL | dict(sampling="poisson", relation="zero-out", accountant="rdp-balle", unit="client", scope="total", trust="central", orders=[2, 3], note="n", premise="p"),
        "calibrate": dict(guarantee_at=lambda s: gaussian_guarantee(s, 1e-5, orders=[2, 4, 8]), eps=3.0, low=0.1, high=100.0, increasing=False, tol=1e-2)},
    "audit": {
        "enumerated_eps": dict(p=LAW[0], q=LAW[1], delta=0.1), "enumerated_delta": dict(p=LAW[0], q=LAW[1], eps=0.1), "clopper_pearson": dict(hits=3, n=10, alarm=0.05),
        "distinguish": dict(present=SCORES, absent=SCORES[::-1] - 1, delta=0.1, alarm=0.05, directions=("forward",)), "ceiling": dict(trials=200, delta=0.1, alarm=0.05),
        "audit_play": dict(mechanism=MADE["gaussian"], relation="zero-out", trials=100, delta=1e-5, rng=RNG, alarm=0.05),
        "claim": dict(mechanism=MADE["gaussian"], relation="zero-out", delta=1e-5, rounds=2),
        "count_pvalue": dict(caught=30, n=100, false=10, m=100, eps=0.5, delta=0.01),
        "judge": dict(present=SCORES, absent=SCORES - 0.5, claims=([0.5], [0.1]), alarm=0.05),
        "claims": dict(mechanism=MADE["gaussian"], relation="zero-out", deltas=(0.1,)),
        "judge_play": dict(mechanism=MADE["gaussian"], relation="zero-out", trials=100, rng=RNG, alarm=0.05),
        "seen_pvalue": dict(lie=lambda eps: MADE["gaussian"].curve("zero-out", eps), delta=MADE["gaussian"].curve("zero-out", audit.EPS), trials=100, away=1.8),
        "smallest_lie": dict(mechanism=MADE["gaussian"], relation="zero-out", trials=1000, alarm=0.05),
        "one_run_pvalue": dict(eps=1.0, correct=30, guesses=40, canaries=100, delta=1e-5), "one_run_eps": dict(correct=30, guesses=40, canaries=100, delta=1e-5, alarm=0.05),
        "guess": dict(scores=SCORES, guesses=20), "one_run": dict(scores=SCORES, included=SCORES > 0.5, guesses=20, delta=1e-5, alarm=0.05)},
    "core": {
        "check_positive": dict(name="x", value=1.0), "check_between": dict(name="x", value=1, low=0, high=3), "check_number": dict(name="x", value=1.0, range="[0, 1]"),
        "check_size": dict(name="d", value=3), "check_reals": dict(name="x", values=[1.0], range="[0, 1]"), "check_floats": dict(name="u", x=ROW), "check_finite": dict(name="u", x=ROW),
        "check_vector": dict(name="u", x=ROW), "check_rows": dict(name="u", x=ROWS), "bernoulli": dict(p=[0.5], rng=RNG), "clip_l2": dict(u=ROWS, clip=0.1), "hadamard": dict(size=4),
        "walsh_hadamard": dict(x=ROW), "log_mean_exp": dict(x=np.ones(3), axis=-1)},
    "games": {
        "gaussian_curve": dict(mu=1.0, eps=[0.5]), "listed_curve": dict(p=LAW[0], q=LAW[1], eps=[0.5]), "repeated": dict(p=LAW[0], q=LAW[1], n=3),
        "two_valued_curve": dict(often=0.5, spent=1.0, eps=[0.5]), "pure_curve": dict(spent=1.0, eps=[0.5]), "less_noise": dict(mechanism=MADE["gaussian"], factor=1.1)},
    "ring": {
        "Ring": dict(bits=16), "whole": dict(name="z", z=[1, 2]), "FixedPoint": dict(ring=ring.Ring(16), scale=0.1, bound=1.0, n_clients=3),
        "to_grid": dict(grid=ring.FixedPoint(ring.Ring(16), 0.1, 1.0, 3), x=ROW), "overflow_probability": dict(bits=16, scale=0.1, bound=1.0, n_clients=3, noise_std=1.0, d=4),
        "discrete_gaussian": dict(sigma2=2.0, shape=3, rng=RNG), "exact_variance": dict(sigma2=2.0), "tau": dict(variance=1.0, n=3), "signs": dict(size=4, seed=0),
        "rotate": dict(u=ROWS, seed=0), "unrotate": dict(v=ROWS, seed=0, d=3), "rounded_norm": dict(norm=3.0, D=4, beta=0.5), "conditional_round": dict(x=[[0.5, 1.5]], norm_bound=3.0, rng=RNG)},
    "summed": {
        "share_std": SUM, "grid": SUM, "least_bits": SUM, "counted_sigma": SUM,
        "guarantee": dict(mechanism=MADE["topk"], rounds=2, delta=1e-5, n_clients=100, cohort=10, sampling="poisson", accountant="rdp-balle", relation="zero-out")},
    "wire": {"mechanism": dict(name="gaussian", clip_norm=1.0, sigma=1.0), "mechanism_class": dict(name="rec")},
    "federated": {
        "Config": dict(rounds=3, cohort=2, sampling="poisson", epochs=1, batch=2, lr=0.1, server="sgd", server_lr=0.1, momentum=0.5, adam_eps=1e-8, eval_every=2, engine="loop", balance=False, steps=3),
        "sample_cohort": dict(n_clients=10, cohort=2, sampling="poisson", rng=RNG), "pick_engine": dict(name="auto", d=10), "Ledger": dict(n_clients=3)},
    "replay": {"count_bits": dict(n_clients=5, cohort=2, rounds=3, bits=MADE["rec"].bits(4), model_bits=128, replay=True, sampling="fixed", seed=0),
               "write_counts": dict(values=[1, 300]), "read_counts": dict(data=b"\x01"), "parse_packet": dict(data=bytes(40))},
    "dpsgd": {"Config": dict(epochs=1, lr=0.1, momentum=0.5, batch=10)},
    "curves": {"delta_of": dict(n_clients=100), "local_epsilon": dict(c=0.5, nbits=70, delta=1e-5)},
    "fedsgd": {"spare_bits": dict(eps=10.0)},
    "mechanisms.compressive": {"largest_factors": dict(low=5, high=9), "chunk_length": dict(d=10, chunks=3), "plan": dict(d=10, fraction=0.5, chunks=2, seed=0, kept="random", t=0),
                               "recover": dict(y=np.ones(4), p=PLAN, penalty=0.05, iterations=3)},
    "mechanisms.ddgauss": {
        "padded": dict(d=3), "omega": dict(variance=1.0, n=3), "concentrated": dict(delta2=1.0, variance=1.0, n=3, D=4), "step": dict(mechanism=MADE["ddgauss"], d=4),
        "noise": dict(mechanism=MADE["ddgauss"], m=3, n=2, rng=RNG), "local_variance": dict(mechanism=MADE["ddgauss"], d=4), "release_epsilon": dict(mechanism=MADE["ddgauss"], d=4),
        "ddgauss_epsilon": dict(scale=0.01, clip=1.0, n_clients=10, local_std=0.3, d=4, q=1.0, rounds=2, delta=1e-5, beta=0.5, relation="zero-out", accountant="rdp-balle"),
        "fit": dict(multiplier=1.0, clip_norm=1.0, n_clients=10, d=4, ring_bits=16, most=1.5),
        "calibrate": dict(eps=3.0, delta=1e-5, clip_norm=1.0, n_clients=10, d=4, rounds=2, q=1.0, ring_bits=16, most=1.5, accountant="rdp-balle")},
    "mechanisms.imvu": {"closed_form": dict(eps=1.0), "pmf": dict(x=[0.5], table=TABLE), "fisher": dict(x=[0.5], table=TABLE), "rdp_exact": dict(orders=[2, 3], kappa=1.0, relation="replace", d=4)},
    "mechanisms.mvu": {"Table": dict(eps=1.0, alphabet=TABLE.alphabet, rows=TABLE.rows, constraint="strict", log=""), "two_symbols": dict(eps=1.0, n_inputs=3, constraint="metric"),
                       "solve": dict(eps=1.0, n_inputs=2, n_outputs=2, constraint="metric"), "law": dict(table=TABLE, x=[0.5])},
    "mechanisms.pm": {"reach": dict(eps=1.0), "window": dict(t=[0.5], eps=1.0), "perturb": dict(t=[0.5], eps=1.0, draws=np.full((2, 1), 0.5)), "density": dict(y=[0.5], t=[0.5], eps=1.0),
                      "variance": dict(t=np.array([0.5]), eps=1.0), "coordinates": dict(rng=RNG, d=4, count=2), "checked": dict(u=ROWS),
                      "remember": dict(mechanism=MADE["pm"], memory=0 * ROWS, u=ROWS, rng=RNG)},
    "mechanisms.privquant": {
        "position": dict(x=ROWS, bound=1.0, levels=4), "levels": dict(bound=1.0, K=4), "quantise": dict(x=ROWS, bound=1.0, levels=4, rng=RNG), "tails": dict(d=4, levels=4),
        "thresholds": dict(d=4, levels=4, kappa_min=0), "smallest_eps": dict(d=4, levels=4, kappa_min=0), "calibrate": dict(d=4, levels=4, eps=3.0, rule="best", kappa_min=0),
        "privatise": dict(x=ROWS, bound=1.0, cal=CAL, rng=RNG), "variances": dict(x=ROWS, bound=1.0, cal=CAL)},
    "mechanisms.quantised": {"longest": dict(mechanism=MADE["quantised"], d=4), "step": dict(mechanism=MADE["quantised"], d=4), "survival": dict(mechanism=MADE["quantised"], u=ROWS, rng=RNG)},
    "mechanisms.rec": {"selection_moment": dict(order=2, s=1.0, n_candidates=8), "select_projection": dict(s=1.0, n_candidates=8, rng=RNG), "loss_law": dict(s=1.0, K=4, up=True, width=1e-3),
                       "decode_group": dict(d=3, std=1.0, seed=1, group=0, k=2)},
    "mechanisms.rec_accounting": {
        "log_moment": dict(j=[2.0, -1.0], s=1.0, K=8), "rdp": dict(orders=[2, 3], c=1.0, K=8, groups=2, direction="both"), "rdp_mixture": dict(orders=[2, 3], c=1.0, K=8, q=0.1, groups=2),
        "rdp_local": dict(orders=[1.5, 2], c=1.0, K=8), "theorem1_epsilon": dict(c=1.0, slots=20, n_clients=10, nbits=70, delta=1e-5, version="iclr"),
        "exact_epsilon": DPREC | dict(relation="poisson-null", conversion="balle", cohort=2), "pld_epsilon": DPREC | dict(relation="poisson-null", cohort=2),
        "pld_bracket": DPREC | dict(relation="poisson-null", cohort=2), "calibrate_clip": dict(eps=3.0, low=0.5, high=1.5, tol=0.5, slots=20, n_clients=10, K=8, groups=1, delta=1e-5)},
    "mechanisms.signsgd": {"log_cosh": dict(y=[1.0]), "half_logit": dict(v=[1.0]), "rdp_signs": dict(orders=[2, 3], sigma=1.0, relation="replace", d=4)},
    "mechanisms.skellam": {
        "check_mean": dict(mu=1.5), "poisson": dict(mu=1.5, shape=3, rng=RNG), "skellam": dict(mu=1.5, shape=3, rng=RNG), "padded": dict(d=3), "step": dict(mechanism=MADE["skellam"], d=4),
        "grid_step": dict(clip=1.0, n_clients=10, local_std=0.3, d=4, bits=16, k=4.0), "noise": dict(mechanism=MADE["skellam"], m=3, n=2, rng=RNG),
        "rdp_skellam": dict(orders=[2, 3], mu=1.0, delta2=1.0, delta1=1.0), "amplify": dict(curve=[0.1, 0.2], q=0.1),
        "skellam_epsilon": dict(scale=0.01, clip=1.0, n_clients=10, local_std=0.3, d=4, q=0.5, rounds=2, delta=1e-5, beta=0.5, relation="zero-out", accountant="rdp-balle"),
        "calibrate": dict(eps=3.0, delta=1e-5, clip_norm=1.0, n_clients=10, d=4, rounds=2, q=1.0, ring_bits=16, most=1.5, accountant="rdp-balle")},
    "mechanisms.sqkr": {"frame": dict(d=4, seed=0), "kashin": dict(u=ROWS.double(), frame=FRAME, clip=1.0, shrink=0.4, support=0.8), "keep_probability": dict(nbits=2, eps=1.0),
                        "coordinates": dict(seed=0, size=8, nbits=2)},
    "mechanisms.sqsgd": {
        "subset_size": dict(d=10, fraction=0.5, padded=False), "padded_size": dict(count=3), "subset": dict(mechanism=MADE["sqsgd"], d=4), "signs": dict(seed=0, size=4), "rotate": dict(x=ROWS, seed=0),
        "unrotate": dict(x=ROWS, seed=0, count=3), "span": dict(bound=1.0, size=4, name="tight"), "cut_probability": dict(size=4)},
    "mechanisms.topk": {
        "Support": dict(coordinates=[0, 2]), "size": dict(fraction=0.5, d=4), "top_k": dict(scores=ROW, fraction=0.5), "random_support": dict(fraction=0.5, d=4, seed=0, t=0),
        "chosen": dict(mechanism=MADE["topk"], d=4), "trainable": dict(mechanism=MADE["topk"], d=4), "cost_kb": dict(values=10, rounds=3, sampled=0.5),
        "scheme": dict(name="FL-CS", fraction=0.5, n_clients=10, clip_norm=1.0, sigma=1.0, seed=0, chunks=1, tolerance=0.1), "private_vote": dict(updates=ROWS, fraction=0.5, sigma=1.0, rng=RNG)},
    "mechanisms.topk_accounting": {
        "log_moments": dict(lam=[1.0, 2.0], sigma=1.0, q=0.1), "theorem1_epsilon": SMALL | dict(lambdas=[1.0, 2.0]), "fixed_size_rdp": dict(sigma=1.0, q=0.1, orders=[2, 3], relation="replace", bound="wang"),
        "fixed_size_epsilon": SMALL | dict(relation="replace", accountant="rdp-balle"), "participations": dict(rounds=10, q=0.1, quantile=0.5, n_clients=3),
        "known_cohort_epsilon": dict(sigma=1.0, participations=3, delta=1e-5, relation="replace", honest=0.9),
        "vote_epsilon": dict(vote_sigma=1.0, delta=1e-5, vote_q=0.5, sigma=1.0, q=0.1, rounds=3, conversion="balle"), "vote_recall": dict(n=100, K=10, voters=5, vote_sigma=0.1),
        "guarantee_table": dict(sigma=4.0, n_clients=100, cohort=10, rounds=2, delta=1e-3, best=2, missing=0.1)},
    "mechanisms.vqsgd": {"corner_bits": dict(d=4), "keep_probability": dict(d=4, eps=1.0), "exact_eps": dict(d=4, eps=1.0), "worst_case": dict(mechanism=MADE["vqsgd"], d=4), "law": dict(mechanism=MADE["vqsgd"], u=ROWS)},
    "secagg": {
        "Setup": dict(n_clients=4, d=3, ring=ring.Ring(16), threshold=2, neighbours=3, session=bytes(16), quorum=3, largest=10, support=b"", committee=4, signatures=3),
        "who": dict(party=1), "spans": dict(bits=5), "polynomial": dict(secret=3, threshold=2, draw=secagg.source(0)), "split": dict(secret=3, at=(1, 2, 3), threshold=2, draw=secagg.source(0)),
        "lagrange": dict(at=(1, 2)), "join": dict(shares={1: 5, 2: 7}, threshold=2), "private_of": dict(value=2**251), "identities": dict(n_clients=2, seed=0), "tails": dict(n=10, marked=3, drawn=4),
        "near_tails": dict(n=10, marked=3, k=4), "split_chance": dict(n=10, bad=3, k=4), "find_committee": dict(n=10, lost=1, bad=1, forked=0.1, mute=0.1, most=8),
        "degree": dict(n_clients=20, dropout=0.1, corrupt=0.1, malicious=True, security=10, correctness=5), "check_rates": dict(dropout=0.1, corrupt=0.1, security=40, correctness=20),
        "overhead": dict(n_clients=4, neighbours=3, d=5, bits=16, threshold=2, quorum=3, committee=4, signatures=3), "ring_words": dict(setup=SETUP, vector=np.array([1, 2, 3]), me=0)},
}
for _name, _given in MECHANISMS.items():  # every constructor, with all of its fields
    GOOD.setdefault(f"mechanisms.{_name}", {})[type(MADE[_name]).__name__] = {f.name: getattr(MADE[_name], f.name) for f in dataclasses.fields(MADE[_name])}

# ---- bad arguments

NUMBERS = (math.nan, math.inf, -math.inf, -1, 0, -0.5, 0.5, 2**63, True, 1j, "x", "", None, (), [], {}, np.array([1.0, 2.0]), np.array(math.nan))
ARRAYS = ("x", None, [], [math.nan], [math.inf], [-1.0], [0.0], [2**63], [1e300], ["x"], [None], [[1.0], [1.0, 2.0]], np.zeros((0, 3)), np.array([1j]), {}, math.nan, 7)
TENSORS = (None, "x", [0.1, 0.2], [], 1.0, np.ones((2, 4), np.float32), torch.ones(2, 4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.float16), torch.ones(2, 4, dtype=torch.bfloat16),
           torch.ones(2, 4, requires_grad=True), torch.full((2, 4), math.nan), torch.full((4,), math.inf), torch.ones(4), torch.ones(2, 4), torch.ones(()), torch.ones(2, 0), torch.ones(0, 4),
           torch.ones(2, 2, 4), torch.ones(2, 4, dtype=torch.complex64))
TEXTS = ("x", "", "Poisson", "None", None, 0, True, math.nan, [], b"x", np.array(["x", "y"]))


def bad(value):
    "What is tried in the place of a good value; nothing for an object that only the package makes."
    if isinstance(value, torch.Tensor): return TENSORS
    if hasattr(value, "_fields"): return ()
    if isinstance(value, (list, tuple, np.ndarray, dict)): return ARRAYS
    if isinstance(value, (str, bytes)) and value != RNG: return TEXTS
    return NUMBERS if value is None or isinstance(value, (int, float)) else ()


RAW = re.compile(r"not supported between|has no attribute|ufunc|operand|broadcast|could not (be )?conver|cannot (be )?(convert|interpreted)|object is not|is ambiguous|arrays? can be|must be real number|"
                 r"too large to|division by|argument '|expected (np|str|sequence)|got an unexpected|math domain|inhomogeneous|zero-size|out of range|unsized|integer is required|^can't|literal|setting an array", re.I)


def is_sentence(text: str) -> bool:
    "Whether an error says what is wrong and what to do, in the package's words; that a cached function takes no list is Python's to say."
    return text.startswith("unhashable type: ") or not RAW.search(text) and len(text.split()) >= 8 and bool(re.search(r"(: | not allowed).*[a-z]", text))


def finite(x) -> bool:
    "Whether a result holds no nan and no infinity, however deep."
    if isinstance(x, torch.Tensor): return bool(torch.isfinite(x).all())
    if isinstance(x, np.ndarray): return x.dtype.kind not in "fc" or bool(np.isfinite(x).all())
    if isinstance(x, (float, np.floating, complex)): return bool(np.isfinite(x))
    if isinstance(x, dict): return all(map(finite, x.values()))
    if isinstance(x, (list, tuple)): return all(map(finite, x))
    if dataclasses.is_dataclass(x) and not isinstance(x, type): return all(finite(getattr(x, f.name)) for f in dataclasses.fields(x))
    return True


class TooSlow(BaseException):
    "Not an Exception, so that nothing catches it."


@contextmanager
def limited(seconds: float):
    "Stop after so much processor time."
    def stop(*_): raise TooSlow()
    old = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try: yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)


def fresh(given: dict) -> dict:
    return {name: seed_tree(0) if isinstance(value, str) and value == RNG else value for name, value in given.items()}


def fault(call, given: dict, name: str, value, may_be_infinite: bool = False):
    "What is wrong with how a call takes one bad argument, or None."
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"), limited(SECONDS):
            warnings.simplefilter("ignore")
            found = call(**fresh(given) | {name: value})
    except (ValueError, TypeError) as error:
        return None if is_sentence(str(error)) else f"{type(error).__name__}: {str(error)[:110]}"
    except (Exception, TooSlow) as error:
        return f"{type(error).__name__}: {str(error)[:110]}"
    return None if may_be_infinite or finite(found) else f"returned {str(found)[:110]}"


def faults(call, given: dict, may_be_infinite: bool = False):
    return [f"{name} = {str(value)[:60]!r}: {wrong}" for name, good in given.items() for value in bad(good)
            if (wrong := fault(call, given, name, value, may_be_infinite))]
