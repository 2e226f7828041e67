"""The contract, checked for every mechanism of the registry.

The registry says what there is and `cases` how it is built. Each statistical test has
false-alarm rate 1e-6, split over its comparisons, and fixed seeds."""

import dataclasses
import functools
import inspect
import itertools
import math
import re

import numpy as np
import pytest
import torch
from cases import CASES, OWN
from laws import ALARM, radius, same_law
from tables import tabled

from dpcomm.core import wire
from dpcomm.core.random import Insecure, seed_tree
from dpcomm.mechanisms import contract, noisy_sums, topk
from dpcomm.privacy import audit, hypothesis_tests
from dpcomm.privacy.guarantee import RELATIONS, Guarantee
from dpcomm.secagg import session

NAMES = OWN or contract.registered()


def every(keep=lambda case: True):
    "The first variant of a mechanism stands for it; the others are slow."
    made = []
    for name in NAMES:
        kept = [(label, case) for label, case in CASES[name].items() if keep(case)]
        made += [
            pytest.param(
                case, id=f"{name}, {label}", marks=[pytest.mark.slow] * (i > 0)
            )
            for i, (label, case) in enumerate(kept)
        ]
    return pytest.mark.parametrize("case", made)


each = every()
summed = every(lambda case: isinstance(case.make(3), noisy_sums.Summed))
SIZES = [1, 2, 7, 64]


@tabled("name", NAMES)
def test_every_registered_mechanism_is_put_to_the_test(name):
    cls = contract.mechanism_class(name)
    home = cls.__module__
    assert cls.name == name
    assert home == f"dpcomm.mechanisms.{name}" or not home.startswith("dpcomm")
    assert CASES[name], f"{name} has no cases: give its class `audited` parameters"
    assert {case.make(3).name for case in CASES[name].values()} == {name}


def told(name: str, thing) -> bool:
    return bool(re.search(rf"(^|\s){name}:\s", inspect.getdoc(thing) or ""))


@tabled("name", sorted(n for n, at in contract._places().items() if ":" not in at))
def test_help_is_enough_to_call_a_method_and_to_set_a_field(name):
    "Of each argument, of what is returned, and of each field of the mechanism."
    cls = contract.mechanism_class(name)
    names = [field.name for field in dataclasses.fields(cls)]
    missing = [name for name in names if not told(name, cls)]
    for method, function in inspect.getmembers(cls, inspect.isfunction):
        told_of = inspect.getdoc(getattr(cls, method)) or ""
        if method.startswith("_"):
            continue
        if not told_of:
            missing.append(method)
        if not hasattr(contract.Mechanism, method):
            continue
        wanted = inspect.signature(getattr(contract.Mechanism, method)).parameters
        wanted = [a for a in wanted if a not in ("self", "release")]
        missing += [f"{method}: {a}" for a in wanted if not told(a, function)]
        if "eturns" not in told_of:
            missing.append(f"{method}: what it returns")
    assert not missing, f"help({name}) does not say: {', '.join(missing)}"


def vector(d: int, norm: float, *path) -> torch.Tensor:
    "A float32 vector of the given norm and a random direction."
    u = seed_tree(0, "vector", d, *path).standard_normal(d)
    return torch.from_numpy((norm * u / np.linalg.norm(u)).astype(np.float32))


def inputs(d: int, clip: float = 1.0) -> dict:
    return {
        "zero": torch.zeros(d),
        "one-hot": torch.eye(d)[d // 2] * 0.5 * clip,
        "inside": vector(d, 0.6 * clip),
        "boundary": vector(d, clip),
        "clipped": vector(d, 5 * clip),
        "tiny": torch.full((d,), 1e-30),
        "huge": vector(d, 1e30),
    }


def streams(n: int, *path) -> list:
    return [seed_tree(0, "row", *path, i) for i in range(n)]


def limit(mechanism) -> tuple:
    "What clipping enforces: the name of the bound, its value, and the order of the norm."
    return next(
        (name, getattr(mechanism, name), order)
        for name, order in (("clip_norm", 2), ("bound", math.inf))
        if hasattr(mechanism, name)
    )


def round_trip(mechanism, u: torch.Tensor, key=None) -> torch.Tensor:
    return mechanism.decode(
        wire.Message.from_bytes(mechanism.encode(u, key).to_bytes(), len(u))
    )


@functools.cache
def is_random(mechanism, d: int) -> bool:
    "Whether the declared variance of a decoded row is above zero."
    return bool(mechanism.moments(vector(1, 0.8).expand(1, d) / d)[1].max() > 0)


# ---- the form of the contract


@each
def test_the_contract_is_signed(case):
    mechanism = case.make(5)
    assert type(mechanism).aggregate is contract.Mechanism.aggregate, "everybody's"
    assert isinstance(mechanism.server_is_deterministic, bool)
    assert mechanism.name in NAMES
    with pytest.raises(dataclasses.FrozenInstanceError):
        mechanism.clip_norm = 3.0
    assert mechanism == case.make(5)
    assert mechanism not in case.others(5)


@each
@tabled("d", SIZES)
def test_shapes_and_types(case, d):
    mechanism = case.make(d)
    rows = torch.stack(list(inputs(d).values()))
    before, few = rows.clone(), rows[::3]
    estimates = mechanism.simulate(rows, streams(len(rows)))
    clipped = mechanism.clip(rows)
    bias, variance = mechanism.moments(few)
    assert estimates.shape == clipped.shape == rows.shape
    assert bias.shape == variance.shape == few.shape
    assert estimates.dtype == clipped.dtype == torch.float32
    assert mechanism.aggregate(estimates, 7, seed_tree(0)).shape == (d,)
    for row in rows:
        decoded = round_trip(mechanism, row, Insecure(3))
        assert decoded.shape == (d,) and decoded.dtype == torch.float32
        assert torch.isfinite(decoded).all()
    assert torch.isfinite(estimates).all()
    assert torch.isfinite(variance).all() and (variance >= 0).all()
    assert torch.equal(rows, before), "the argument was changed"


@each
@tabled("d", SIZES)
def test_clipping_bounds_the_norm(case, d):
    mechanism = case.make(d)
    _, bound, order = limit(mechanism)
    for kind, u in inputs(d, bound).items():
        clipped = mechanism.clip(u[None])[0].double()
        assert torch.linalg.vector_norm(clipped, order) <= bound * (1 + 1e-6), kind
        if kind in ("zero", "one-hot", "inside", "tiny"):
            assert torch.equal(clipped.float(), u), kind


@each
@tabled("d", SIZES)
def test_measured_bits_are_declared_bits(case, d):
    mechanism = case.make(d)
    declared = mechanism.bits(d)
    for i, u in enumerate(inputs(d).values()):
        message = mechanism.encode(u, Insecure(i))
        assert 8 * len(message.to_bytes()) == 8 * message.nbytes == declared.total
        assert 8 * len(message.payload) == declared.content
    assert declared.header == wire.header_bits(mechanism.name)
    parts = declared.payload, declared.header, declared.shared_randomness
    assert declared.total == sum(parts) and declared.per_param == declared.total / d


# ---- randomness


@each
def test_the_key_alone_decides_the_message(case):
    "In 64 dimensions, where messages of one bit a parameter do not coincide by chance."
    mechanism, u = case.make(64), vector(64, 0.8)

    def sent(key):
        return mechanism.encode(u, Insecure(key)).to_bytes()

    messages = {key: sent(key) for key in (0, 1, 2, 2**31, 2**63, 2**100)}
    torch.rand(3)
    np.random.rand(3)
    assert messages == {key: sent(key) for key in reversed(messages)}
    different = len(messages) if is_random(mechanism, len(u)) else 1
    assert len(set(messages.values())) == different
    for data in messages.values():
        message = wire.Message.from_bytes(data, len(u))
        assert torch.equal(mechanism.decode(message), mechanism.decode(message))


@each
def test_torch_s_defaults_decide_nothing(case):
    "Another default type and device, before anything of these sizes is in a cache."
    mechanism = case.make(11)
    u = torch.from_numpy(seed_tree(0, "defaults").standard_normal((2, 11))).float() / 8

    def seen():
        message = mechanism.encode(u[0], Insecure(4))
        rows = mechanism.simulate(u, seed_tree(0, "rows"))
        memory = mechanism.client_memory(2, 11)
        return [message.to_bytes(), mechanism.decode(message), rows, memory]

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            moved = seen()
    finally:
        torch.set_default_dtype(before)
    for ours, other in zip(seen(), moved):
        if isinstance(ours, torch.Tensor):
            assert ours.dtype == other.dtype and torch.equal(ours, other)
        else:
            assert ours == other


@each
@tabled("d", SIZES)
def test_a_batch_is_its_rows(case, d):
    mechanism = case.make(d)
    rows = torch.stack(list(inputs(d).values()))
    own = streams(len(rows))
    alone = [mechanism.simulate(row[None], [one]) for row, one in zip(rows, own)]
    batch = mechanism.simulate(rows, streams(len(rows)))
    torch.testing.assert_close(batch, torch.cat(alone), rtol=1e-5, atol=1e-6)
    few = rows[[0, 2, 4]]
    moments = zip(*(mechanism.moments(row[None]) for row in few))
    for whole, parts in zip(mechanism.moments(few), moments):
        torch.testing.assert_close(whole, torch.cat(parts), rtol=1e-6, atol=1e-9)


def messages_of(mechanism, d: int, n: int) -> list:
    return [mechanism.encode(vector(d, 0.7, i), Insecure(i)) for i in range(n)]


def folded(mechanism, d, messages):
    return functools.reduce(contract.Total.add, messages, contract.Total(mechanism, d))


@each
@tabled("d", [1, 7, 64])
def test_a_total_gives_the_aggregate_in_any_order_and_any_tree(case, d):
    m, cohort = case.make(d), 7
    n = max(10, getattr(m, "honest", 1))
    messages = messages_of(m, d, n)
    estimates = torch.stack([m.decode(message) for message in messages])
    wanted = m.aggregate(estimates, cohort, seed_tree(0, "server"))
    straight = folded(m, d, messages)
    parts = [folded(m, d, messages[i : i + k]) for i, k in ((4, 1), (5, n - 5), (0, 4))]
    tree = parts[0].merge(contract.Total(m, d).merge(parts[1]).merge(parts[2]))
    for total in (
        straight,
        folded(m, d, messages[::-1]),
        tree,
        tree.merge(contract.Total(m, d)),
    ):
        assert total.n == n and total.sum.dtype == straight.sum.dtype
        if straight.sum.dtype == np.int64:
            assert np.array_equal(total.sum, straight.sum)
        found = total.average(cohort, seed_tree(0, "server"))
        assert found.shape == (d,) and found.dtype == torch.float32
        size = float(estimates.abs().max()) + 1e-30
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6 * size)


@each
def test_every_row_has_noise_of_its_own(case):
    "From one stream for all, or from one a row: no stream is broadcast to three clients."
    mechanism, u = case.make(64), vector(64, 0.8)
    random = is_random(mechanism, 64)
    rows = mechanism.simulate(u.repeat(5, 1), seed_tree(0))
    assert len({tuple(row.tolist()) for row in rows}) == (5 if random else 1)
    for n in (1, 2, 5) if random else ():
        with pytest.raises(ValueError):
            mechanism.simulate(u.repeat(3, 1), streams(n))


@each
def test_the_aggregate_is_the_mean_over_the_expected_cohort(case):
    "Up to the server's noise."
    mechanism = case.make(6)
    estimates = torch.stack([vector(6, 0.5, i) for i in range(4)])

    def draw(e, i):
        return mechanism.aggregate(e, 5, seed_tree(0, "server", i))

    if mechanism.server_is_deterministic:
        assert torch.equal(draw(estimates, 0), draw(estimates, 1))
    for i in range(3):
        difference = draw(estimates, i) - draw(estimates[:0], i)
        torch.testing.assert_close(
            difference, estimates.sum(0) / 5, rtol=1e-5, atol=1e-5
        )
    assert not torch.isnan(draw(estimates[:0], 0)).any(), "an empty cohort"


# ---- laws


def looks(first: tuple, *others: tuple):
    "One dimension and kind of update in the first tier, all others in the deep one."
    rest = pytest.param(others, marks=pytest.mark.slow)
    return pytest.mark.parametrize("looks", [[first], rest], ids=["one", "others"])


@each
@looks(
    (6, "clipped"),
    (1, "boundary"),
    (1, "clipped"),
    *((6, kind) for kind in ("zero", "one-hot", "inside", "boundary")),
)
def test_declared_bias_and_variance(case, looks):
    "12,000 simulated rows against the closed forms, every entry."
    for d, kind in looks:
        mechanism, n = case.make(d), 12_000
        u = inputs(d, limit(mechanism)[1])[kind]
        bias, variance = (m[0].double().numpy() for m in mechanism.moments(u[None]))
        drawn = mechanism.simulate(u.expand(n, d), seed_tree(0, "moments", kind, d))
        error = (drawn.double() - u.double()).numpy() - bias
        if not variance.any():
            np.testing.assert_allclose(error, 0, atol=1e-6)
            continue
        assert (np.abs(error.mean(0)) <= radius(np.sqrt(variance), n, 2 * d)).all()
        square = error**2
        # a square of one size has only rounding for a spread
        assert (
            np.abs(square.mean(0) - variance)
            <= radius(square.std(0), n, 2 * d) + 1e-6 * variance
        ).all()


@each
@looks((5, "inside"), (1, "boundary"), (5, "zero"), (5, "clipped"))
def test_messages_and_simulation_have_one_law(case, looks):
    """Kolmogorov-Smirnov on 1,500 messages and 9,000 simulated rows: at the alarm, split
    over eight looks, distributions 0.08 apart are told from each other. The other looks take
    500 messages, which is 0.14 apart.
    """
    n = 1500 if len(looks) == 1 else 500
    for d, kind in looks:
        mechanism = case.make(d)
        u = inputs(d, limit(mechanism)[1])[kind]
        sent = [round_trip(mechanism, u, Insecure(key)) for key in range(n)]
        sent = torch.stack(sent).double().numpy()
        drawn = mechanism.simulate(u.expand(6 * n, d), seed_tree(0, "laws", kind, d))
        drawn = drawn.double().numpy()
        if not is_random(mechanism, len(u)):
            assert np.array_equal(sent[0], drawn[0])
            assert (np.ptp(sent, axis=0) == 0).all()
            assert (np.ptp(drawn, axis=0) == 0).all()
            continue
        seen = [*views(u.double().numpy())]
        p_values = [same_law(look(sent), look(drawn)) for look in seen]
        assert min(p_values) > ALARM / len(seen), p_values
        bias, variance = (m[0].double().numpy() for m in mechanism.moments(u[None]))
        error = sent.mean(0) - u.double().numpy() - bias
        assert (np.abs(error) <= radius(np.sqrt(variance), n, d) + 1e-6).all()


def views(u: np.ndarray):
    "Projections and squared lengths, whole and by halves; what is across, and a product."
    d = len(u)
    along, half = u if u.any() else np.ones(d), np.arange(d) < d - d // 2
    for part in (half | ~half, half, ~half)[: 3 if d > 1 else 1]:
        yield lambda x, axis=along * part: x @ axis
        yield lambda x, part=part: x**2 @ part
    if d > 1:
        across = seed_tree(1, d).standard_normal(d)
        across -= along * (along @ across) / (along @ along)
        yield lambda x: x @ across
        yield lambda x: x[:, 0] * x[:, -1]


# ---- secure sums


@summed
@tabled("d", [1, 6, 8])
def test_a_secure_session_takes_it_in_two_lines(case, d):
    "All clients that are counted on, and one who is silent when vectors are due."
    m = case.make(d)
    n = max(5, m.honest + 1)
    updates = [vector(d, 0.9, i) for i in range(n)]
    keys = [Insecure(i) for i in range(n)]

    words = [m.summand(u, key) for u, key in zip(updates, keys)]
    drop = {n - 1: "masked"}
    outcome = session.run_session(words, m, (n + 1) // 2, seed=0, drop=drop)
    estimate = m.from_sum(outcome.total, n=len(outcome.survivors), d=d)

    messages = [m.encode(u, key) for u, key in zip(updates[:-1], keys)]
    decoded = torch.stack([m.decode(message) for message in messages])
    assert estimate.shape == (d,) and estimate.dtype == torch.float32
    assert np.array_equal(outcome.total, m.ring.sum(words[:-1]))
    mean = m.aggregate(decoded, n - 1, seed_tree(0))
    torch.testing.assert_close(estimate / (n - 1), mean, rtol=1e-4, atol=1e-5)


@summed
def test_a_message_carries_the_words_of_its_client(case):
    m, u = case.make(7), vector(7, 0.9)
    words = m.summand(u, Insecure(5))
    assert words.dtype == np.int64 and words.min() >= 0 and words.max() < m.ring.modulus
    assert np.array_equal(words, m.summand(u, Insecure(5)))
    assert not np.array_equal(words, m.summand(u)), "words are drawn afresh"
    assert torch.equal(m.lifted(words, 7), m.decode(m.encode(u, Insecure(5))))
    for wrong in (words[:-1], np.append(words, 0)):
        with pytest.raises(ValueError):
            m.from_sum(wrong, m.honest, 7)


@summed
def test_the_three_steps_of_an_engine_have_the_law_of_the_messages(case):
    "Reconstruct(sum of sketches + noise) against aggregate(simulate)."
    m, d, n, rounds = case.make(6), 6, 3, 2000
    if hasattr(m, "iterations"):  # of a reconstruction that is not linear
        m = dataclasses.replace(m, iterations=0)
    u, rng = torch.stack([vector(d, 0.9, i) for i in range(n)]), seed_tree(0, "noise")
    total = m.sketch(u).sum(0)
    engine = [
        m.reconstruct(total + m.noise(len(total), n, rng), n, d) for _ in range(rounds)
    ]
    estimates = m.simulate(u.repeat(rounds, 1), seed_tree(0, "messages"))
    server = [m.aggregate(part, n, None) for part in estimates.split(n)]
    bias, variance = (moment.double().numpy() for moment in m.moments(u))
    mean, std = (u.numpy() + bias).mean(0), np.sqrt(variance.sum(0)) / n
    engine, server = (torch.stack(x).double().numpy() for x in (engine, server))
    for x in (engine, server):
        assert (np.abs(x.mean(0) - mean) <= radius(std, rounds, 4 * d) + 1e-3).all()
        spread = radius(math.sqrt(2), rounds, 4 * d) + 0.01  # noise() rounds nothing
        assert (np.abs(x.var(0) - std**2) <= spread * std**2 + 1e-9).all()
    noisy = np.flatnonzero(std > 1e-6)
    assert len(noisy)
    assert min(same_law(engine[:, j], server[:, j]) for j in noisy) > ALARM / len(noisy)


@summed
def test_a_sketch_is_clipped_and_nobody_adds_no_noise(case):
    m = case.make(6)
    sketch = m.sketch(torch.stack([vector(6, 5.0, i) for i in range(3)]))
    assert len(sketch) == 3 and sketch.dtype == torch.float32
    assert sketch.norm(dim=1).max() <= m.clip_norm * (1 + 1e-6)
    assert not m.noise(sketch.shape[1], 0, seed_tree(0)).any()


@summed
def test_amplification_is_not_claimed_against_the_server(case):
    "It knows who took part; only those who see the models alone do not."
    m = case.make(7)
    run, n = case.release | dict(n_clients=10 * m.n_clients), m.n_clients
    whole = m.guarantee(**run, sampling="none")
    sampled = m.guarantee(**run, cohort=n, sampling="poisson")
    assert (whole.trust, whole.sampling) == ("secagg", "none")
    assert (sampled.trust, sampled.sampling) == ("central", "poisson")


# ---- settings and games that many have in common


@each
def test_settings_are_kept_as_plain_numbers(case):
    "A mechanism is hashed by its text, in which numpy's numbers have names."
    mechanism = case.make(3)
    given = {f.name: getattr(mechanism, f.name) for f in dataclasses.fields(mechanism)}
    kinds = {float: (np.float64, np.float32, int), int: (np.int64,), bool: (np.bool_,)}
    for name, value in given.items():
        for kind in kinds.get(type(value), ()):
            if not math.isfinite(value) or float(kind(value)) != value:
                continue
            twin = type(mechanism)(**(given | {name: kind(value)}))
            assert twin == mechanism and repr(twin) == repr(mechanism), name
            assert twin.fingerprint == mechanism.fingerprint, name
            assert type(getattr(twin, name)) is type(value), name


@each
def test_the_mean_of_a_sign_is_what_is_declared(case):
    "Where signs are sent: the simulation of steps uses it in place of coins."
    m = case.make(1)
    u = torch.from_numpy(0.95 * limit(m)[1] * np.linspace(-1, 1, 39)[:, None])
    try:
        if m.mean_sign(u) is None:
            return
    except ValueError:  # of more symbols than two
        return
    mean = m.moments(u)[0] + u
    torch.testing.assert_close(m.step * m.mean_sign(u), mean, rtol=1e-9, atol=1e-12)
    for kind in (np.float32, np.float64):
        u = np.linspace(-40, 40, 41).astype(kind)
        seen, of_tensor = m.mean_sign(u), m.mean_sign(torch.from_numpy(u))
        assert seen.dtype == kind and of_tensor.dtype == torch.from_numpy(u).dtype
        assert np.abs(seen).max() <= 1 and (np.diff(seen) >= 0).all()
        np.testing.assert_allclose(of_tensor, seen, rtol=1e-5, atol=1e-6)


@each
def test_every_setting_is_in_the_fingerprint(case):
    made = [case.make(7), *case.others(7)]
    assert len({m.fingerprint for m in made}) == len(made)


PUBLIC = ("seed", "frame_seed", "rotation_seed", "round")


@each
def test_public_settings_reach_the_message(case):
    "With the same key and another public seed or round the estimate is another."
    mechanism, u = case.make(64), vector(64, 0.8)
    for name in PUBLIC:
        if hasattr(mechanism, name) and not ignored(mechanism, name):
            value = getattr(mechanism, name) + 1
            other = dataclasses.replace(mechanism, **{name: value})
            assert not torch.equal(
                round_trip(mechanism, u, Insecure(1)), round_trip(other, u, Insecure(1))
            ), name


def ignored(mechanism, name: str) -> bool:
    "Whether a public setting has nothing to choose here."
    if name == "round" and mechanism.for_round(1) == mechanism:
        return True
    if getattr(mechanism, "fraction", 0.0) == 1.0:
        return name == "round" or not getattr(mechanism, "rotated", False)
    given = isinstance(getattr(mechanism, "support", None), topk.Support)
    return given or getattr(mechanism, "kept", "random") == "low"


@each
def test_no_privacy_is_said_or_refused(case):
    "Where no relation is claimed, eps is infinite, or there is no guarantee."
    for m in (case.make(7), *case.others(7)):
        if m.relations:
            continue
        try:
            found = m.guarantee(**case.release)
        except ValueError as error:
            assert "gives no privacy guarantee" in str(error)
        else:
            assert found.eps == math.inf and "no privacy" in str(found)


def by_law(mechanism) -> dict:
    "How a game is played without messages, where it has such a way."
    known = inspect.signature(mechanism.game).parameters
    return dict(path="law") if "path" in known else {}


@each
def test_a_game_of_more_rounds_scores_more(case):
    "Four releases tell the worlds four times as far apart; no pure score is above its epsilon."
    mechanism, n = case.make(4), 600
    fast = by_law(mechanism)
    for relation, arguments in mechanism.relations.items():
        given, gaps, errors = without_relation(arguments), [], []
        for rounds in (1, 4):
            here, there = (
                mechanism.attack_scores(
                    relation,
                    world,
                    n,
                    seed_tree(rounds, world),
                    **given | fast,
                    rounds=rounds,
                )
                for world in (True, False)
            )
            for scores in (*here.values(), *there.values()):
                assert scores.shape == (n,) and np.isfinite(scores).all()
            attack = next(iter(here))
            here, there = here[attack], there[attack]
            gaps.append(here.mean() - there.mean())
            errors.append(math.hypot(here.std(), there.std()) * 4 / rounds)
            if isinstance(mechanism, contract.Local) and attack == "likelihood":
                most = rounds * mechanism.message_epsilon() * (1 + 1e-9)
                assert max(np.abs(here).max(), np.abs(there).max()) <= most
        assert gaps[1] > 2 * gaps[0], relation
        assert abs(gaps[1] - 4 * gaps[0]) <= radius(math.hypot(*errors), n), relation


# ---- refusals


@each
@tabled("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(case, bad):
    mechanism, u = case.make(4), torch.tensor([0.1, bad, 0.0, 0.2])
    for call in (
        lambda: mechanism.encode(u),
        lambda: mechanism.simulate(torch.stack([u * 0, u]), seed_tree(0)),
        lambda: mechanism.clip(u[None]),
        lambda: mechanism.moments(u[None]),
    ):
        with pytest.raises(ValueError, match="nan or inf"):
            call()


@each
@tabled("rng", [5, "7"])
def test_what_is_no_stream_is_refused_where_something_is_drawn(case, rng):
    mechanism, rows = case.make(4), vector(4, 0.8)[None]
    try:
        simulated = mechanism.simulate(rows, rng)
    except TypeError as error:
        assert f"rng is {rng!r}; it must be a numpy Generator" in str(error)
    else:
        assert torch.equal(simulated, mechanism.simulate(rows, seed_tree(0)))


@each
def test_damaged_messages_are_refused(case):
    mechanism = case.make(7)
    data = mechanism.encode(vector(7, 0.8)).to_bytes()
    damaged = [data[:n] for n in range(len(data))] + [data + b"\0"]
    for i, flip in itertools.product(range(len(data)), (1, 128, 255)):
        damaged.append(data[:i] + bytes([data[i] ^ flip]) + data[i + 1 :])
    for wrong in damaged:
        with pytest.raises(ValueError):
            mechanism.decode(wire.Message.from_bytes(wrong, 7))


# ---- guarantees


@each
def test_a_guarantee_is_complete_and_grows_with_rounds(case):
    mechanism, n = case.make(7), case.release["rounds"]
    runs = (case.release | dict(rounds=m) for m in (n, 10 * n, np.int64(n)))
    few, more, same = (mechanism.guarantee(**run) for run in runs)
    assert repr(same) == repr(few), "numpy's numbers become plain ones"
    for g in (few, more):
        assert isinstance(g, Guarantee) and g.scope == "total"
        assert g.unit and g.relation and g.accountant and g.trust
        assert g.delta == case.release["delta"]
    assert 0 < few.eps <= more.eps


@each
def test_a_guarantee_that_cannot_be_given_is_refused_by_name(case):
    "Whatever a mechanism says that it does not account for, and what nobody does."
    mechanism = case.make(7)
    never = [dict(rounds=0), dict(rounds=1.5), dict(delta=1.0), dict(delta=-1e-3)]
    never += [dict(sampling="nobody"), dict(accountant="magic")]
    known = {how.get("sampling") for how in mechanism.relations.values()}
    known |= {*mechanism.samplings}
    never += [dict(sampling=drawn) for drawn in {"poisson", "fixed"} - known]
    if case.release["delta"]:
        never.append(dict(delta=0.0))
    takes = inspect.signature(mechanism.guarantee).parameters
    if "relation" in takes and "null-slot" not in mechanism.relations:
        never.append(dict(relation="null-slot"))
    for change in (*never, *case.refused):
        names = "|".join([*change, "cohort", "d", "table"])  # or what stands beside it
        with pytest.raises(ValueError, match=rf"\b({names})s?\b"):
            mechanism.guarantee(**(case.release | change))
            pytest.fail(f"{change} was accepted")


# ---- audits


@each
def test_the_audit_does_not_exceed_the_claim(case):
    "Every relation that the mechanism names, through its own game."
    mechanism, delta = case.make(4), 1e-2
    assert set(mechanism.relations) <= set(RELATIONS)
    for relation in mechanism.relations:
        claimed = audit.claim(mechanism, relation, delta)
        found = audit.audit_play(
            mechanism, relation, 500, delta, seed_tree(0, "audit", relation), ALARM
        )
        assert claimed.relation == relation and claimed.delta == delta
        assert not audit.refutes(found, claimed), f"{found}, but claimed {claimed}"


@each
def test_a_curve_is_a_curve_below_the_guarantee(case):
    "Falling from at most 1, convex in e^eps."
    mechanism, eps = case.make(4), np.log(np.linspace(1, 30, 59))
    for relation in mechanism.relations:
        arguments = without_relation(mechanism.relations[relation])
        delta = mechanism.privacy_profile(relation, eps, **arguments)
        assert delta.shape == eps.shape and (0 <= delta).all() and (delta <= 1).all()
        assert (np.diff(delta) <= 1e-9).all()
        assert (np.diff(delta, 2) >= -1e-7).all(), relation
        if (delta == 1).all():
            continue
        for at in (1e-1, 1e-2, 1e-4):
            stated = audit.claim(mechanism, relation, at)
            most = (0 if stated.accountant == "pure" else at) + 1e-5
            found = mechanism.privacy_profile(relation, stated.eps, **arguments)
            assert found <= most, (relation, at)


@each
def test_half_the_noise_is_caught(case):
    "A mechanism with half the noise, or twice the epsilon."
    mechanism = case.make(4)
    elsewhere = mechanism.name in ("rec", "mvu", "privquant", "sqsgd")  # in test_audit
    if elsewhere or not mechanism.relations or getattr(mechanism, "table", None):
        return
    relation = next(iter(mechanism.relations))
    arguments = without_relation(mechanism.relations[relation])
    lie, rng = hypothesis_tests.with_less_noise(mechanism, 2.0), seed_tree(0, "half")
    known = (audit.EPS, mechanism.privacy_profile(relation, audit.EPS, **arguments))
    assert audit.judge_play(lie, relation, 20_000, rng, ALARM, known).refuted


@each
def test_a_game_is_of_the_relations_that_are_named(case):
    with pytest.raises(ValueError, match="relation"):
        case.make(4).attack_scores("nobody", True, 100, seed_tree(1))


def without_relation(arguments: dict) -> dict:
    "Arguments of a game, whose relation goes by position."
    return {name: value for name, value in arguments.items() if name != "relation"}
