"""The mechanisms of DP-REC's three studies, against the arithmetic that defines them."""

from dataclasses import replace

import pytest
from tables import tabled

from dpcomm.experiments import configurations
from dpcomm.experiments.dprec import ablations as dprec_ablations
from dpcomm.experiments.dprec import by_writer as dprec_by_writer
from dpcomm.experiments.dprec import study_lines
from dpcomm.experiments.dprec.femnist_columns import configs, paper_setting

N, SIZES = 539, (2000,) * 8
SETTINGS = dprec_by_writer.settings("full") | dict(short=1500, long=4000)


def line(key):
    return study_lines.run_spec(SETTINGS, key, N, SIZES)


def test_unclipped_lines_promise_nothing_and_reach_no_clip():
    for key in ("only.rec", "only.rec64", "only.fedavg"):
        curve = line(key)
        assert curve.describe() == "no privacy claimed"
        assert curve.mechanism.clip_norm == study_lines.FAR
        assert curve.config.rounds == 4000


@tabled("d, last", [(640, 64), (650, 10), (63, 63)])
def test_groups_of_64_cover_every_parameter(d, last):
    config = configs(SETTINGS, "cpu")[1]
    groups = study_lines.unclipped("only.rec64", config, (d,)).mechanism.groups
    assert sum(groups) == d and groups[-1] == last
    assert set(groups[:-1]) <= {paper_setting("only.group_size")}


def test_plain_averaging_hides_nothing():
    plain = line("only.fedavg").mechanism
    assert plain.clip_norm * plain.sigma == pytest.approx(1e-9)
    assert line("only.fedavg").config.sampling == "fixed"
    assert line("only.rec").config.sampling == "replacement"


@pytest.mark.parametrize("eps, mine", [(3, "bits7"), (1, "local1.rec")])
def test_local_noise_buys_one_message_what_a_message_of_rec_has(eps, mine):
    "The Gaussian's epsilon of one message is that of DP-REC's, by its own definition."
    c = configurations.calibrated_c(eps, N, 100, 1500, len(SIZES))
    delta = configurations.delta_of(N)
    target = configurations.local_epsilon(c, 7 * len(SIZES), delta)
    noisy = line(f"local{eps}.fedavg")
    once = noisy.guarantee(1500)
    assert once.scope == "per-round" and once.eps == pytest.approx(target, rel=1e-3)
    assert once == study_lines.local(
        "other", noisy.config, noisy.mechanism.sigma, delta
    ).guarantee(3)
    assert noisy.as_run(1500)["zero-out"].eps > once.eps
    assert line(mine).mechanism.index_bits == 7


def test_bits_change_the_message_and_nothing_else():
    lines = {b: line(f"bits{b}") for b in (4, 5, 6, 7)}
    for b, curve in lines.items():
        assert curve.mechanism.bits(sum(SIZES)).payload == b * len(SIZES)
        assert replace(lines[7].mechanism, index_bits=b) == curve.mechanism
        assert curve.config == lines[7].config


def test_a_sample_has_the_deviation_of_recs_prior():
    sample, rec = line("none").mechanism, line("bits7").mechanism
    assert sample.clip_norm == rec.clip_norm
    assert sample.clip_norm * sample.sigma == pytest.approx(rec.std)
    assert sample.bits(sum(SIZES)).content == 32 * sum(SIZES)


@tabled("key", dprec_ablations.LINES)
def test_every_line_of_the_ablations_has_a_curve_of_its_name(key):
    s = dprec_ablations.settings("smoke")
    curve = study_lines.run_spec(s, key, 100, (40, 40, 20))
    assert curve.key == key
    assert curve.config.rounds == s["long" if key.startswith("only") else "short"]
    promised = key != "none" and not key.startswith("only")
    assert (curve.guarantee is not None) == promised
