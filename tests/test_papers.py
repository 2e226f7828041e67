"The transcription of DP-REC: a second, independent typing compared with the TOML, and the checks that guard the file."
import re, tomllib
from datetime import date

import numpy as np
import pytest

from dpcomm import papers

# Typed a second time, row by row as the tables are printed. A number is value, value+-spread, or ~value; '-' is an empty cell.
TABLE_1 = """
mnist        | fedavg           rec        | 3 10
  eps3.acc   | 82.1+-0.8        69.5+-1.5
  eps6.acc   | 90.0+-0.4        83.7+-0.6
  comm       | 43               0.01
femnist      | fedavg           ddg16  ddg12  rec | 3 - - 3
  eps1.acc   | 66.0+-0.2        -      -      59.7+-0.3
  eps3.acc   | 74.6+-0.1        ~72    ~25    67.1+-0.2
  eps6.acc   | 75.6+-0.1        ~77    ~71    69.2+-0.3
  comm       | 259              194    178    14.2
shakespeare  | fedavg           rec        | 3 3
  eps3.acc   | 39.0+-0.1        29.2+-0.2
  comm       | 81               0.1
solr         | fedavg           ddg16  ddg12  rec | 2 - - 2
  eps1.recall5 | 19.3+-0.0      ~14    ~10    18.4+-0.7
  comm       | 3356             2517   2307   32
"""
ICLR_TABLE_1 = """
iclr.mnist       | fedavg       rec        | 4 11
  eps3.acc       | 82.1+-0.8    66.5+-1.5
iclr.mnist       | fedavg       rec        | 4 4
  eps6.acc       | 90.0+-0.4    79.0+-1.9
iclr.femnist     | fedavg       rec        | 4 4
  eps1.acc       | 65.7+-0.3    59.3+-0.1
  eps3.acc       | 74.2+-0.1    67.0+-0.1
  eps6.acc       | 75.5+-0.2    69.1+-0.1
iclr.shakespeare | fedavg       rec        | 4 4
  eps3.acc       | 39.0+-0.1    29.0+-0.1
"""
TABLE_2 = """
mnist        100     50000      500.00   73.10
femnist      3500    705595     201.60   78.92
shakespeare  660     3678451    5573.41  6460.77
solr         342477  135818730  396.58   1278.94
"""
TABLE_3 = """
eps1.rec  59.7+-0.3  14.2
eps3.rec  67.1+-0.2  14.2
eps6.rec  69.2+-0.3  14.2
fedavg    86.28      690.6
rec       80.69      14.2
rec64     84.14      332.2
"""
ICLR_TABLE_3 = "eps1.rec 59.3+-0.1\neps3.rec 67.0+-0.1\neps6.rec 69.1+-0.1"
SINGLE = """
femnist.local3.fedavg.acc 68.9   femnist.local3.rec.acc 63.4      femnist.local1.fedavg.acc 60.1   femnist.local1.rec.acc 57.4
femnist.local3.loss 5.5          femnist.local1.loss 2.7          femnist.local.ratio 72.5
mnist.ratio 4300                 solr.ratio 105                   femnist.ratio 18
femnist.ratio_at_accuracy 8.4    mnist.ratio_at_accuracy 1705     extra_eps.low 2                  extra_eps.high 2.4
femnist.eps1.reduction 6.5       index.equivalent 4000            solr.participation 26
solr.test_samples 16586035       solr.test_samples.main_text 1600000
mean.chen.mse 0.07               mean.rec_poor_prior.mse 0.3      mean.rec_good_prior.mse 0.03
mean.chen_public_randomness.mse 10  mean.bits 21                  mnist.eps3.quant8.acc 58
iclr.femnist.ratio_at_accuracy 8.3  iclr.mnist.ratio_at_accuracy 1533  iclr.extra_eps.low 1.9      iclr.extra_eps.high 2.2
mnist.eps3.order 12.6            mnist.eps6.order 6.3             mnist.fedavg.order 7.9           mnist.rec.order 14.2
"""


def number(text):
    value, _, spread = text.lstrip("~").partition("+-")
    return float(value), float(spread) if spread else None


def second_typing():
    "key -> (value, spread, n_runs) of the second typing; n_runs is '?' where a block does not say."
    found = {}
    for line in filter(None, (TABLE_1 + ICLR_TABLE_1).splitlines()):
        parts = [p.split() for p in line.split("|")]
        if not line.startswith(" "):
            task, methods, runs = parts[0][0], parts[1], parts[2]
            continue
        row = parts[0][0].split(".")
        for method, n, text in zip(methods, runs, parts[1], strict=True):
            if text == "-": continue
            key = ".".join([task, *row[:-1], method, row[-1]])
            found[key] = (*number(text), None if row[-1] == "comm" or n == "-" else int(n))
    for line in TABLE_2.strip().splitlines():
        task, *values = line.split()
        for name, v in zip(("clients", "samples", "client_size.mean", "client_size.std"), values, strict=True):
            found[f"{task}.{name}"] = (float(v), None, None)
    for prefix, table in (("", TABLE_3), ("iclr.", ICLR_TABLE_3)):
        for line in table.strip().splitlines():
            name, *values = line.split()
            for kind, v in zip(("acc", "comm"), values):
                n = (4 if prefix else 3) if "+-" in v else None
                found[f"{prefix}femnist.only.{name}.{kind}"] = (*number(v), n)
    words = SINGLE.split()
    return found | {k: (float(v), None, None) for k, v in zip(words[::2], words[1::2], strict=True)}


def test_every_number_equals_its_second_typing():
    first = {c.key: (float(c.value), c.spread, c.n_runs) for c in papers.cells("dprec")}
    assert first == second_typing()


def test_a_tilde_is_a_reading_error():
    tildes = {m for line in TABLE_1.splitlines() for m in re.findall(r"~(\d+)", line)}
    marked = {str(c.value) for c in papers.cells("dprec", "table1") if c.read_err}
    assert marked == tildes


# task.name arXiv [ICLR]; one value where both texts agree
HYPERS = """
mnist.client_lr .01          mnist.server_lr .002         mnist.server_beta1 .9       mnist.server_beta2 .999     mnist.rounds 1000
mnist.cohort 10              mnist.local_epochs 1         mnist.batch_size 20         mnist.fedavg.clip .01       mnist.rec.std .005
mnist.fedavg.sigma.eps3 3.8  mnist.fedavg.sigma.eps6 2.15 mnist.rec.c.eps3 .545/.5    mnist.rec.c.eps6 .87/.7625  mnist.n_clients 100
mnist.partition.alpha 1      mnist.n_train 50000          all.rec.bits 7              all.delta.exponent 1.1      mnist.fedavg.n_runs 3/
mnist.rec.n_runs 10/         mnist.n_runs /4              mnist.rec.n_runs.eps3 /11
femnist.client_lr .05        femnist.server_lr 1          femnist.cohort 100          femnist.local_epochs 1      femnist.batch_size 20
femnist.fedavg.rounds 1500   femnist.rec.rounds 4000      femnist.fedavg.clip .1      femnist.rec.std .03         femnist.n_clients 3500
femnist.fedavg.sigma.eps1 5  femnist.fedavg.sigma.eps3 1.85  femnist.fedavg.sigma.eps6 1.15  femnist.n_classes 62   femnist.n_runs 3/4
femnist.rec.c.eps1 .77/.75   femnist.rec.c.eps3 1.41/1.35 femnist.rec.c.eps6 1.745/1.66   femnist.local.rounds 1500
femnist.only.rounds 4000     femnist.only.group_size 64
shakespeare.client_lr 1      shakespeare.server_lr 1      shakespeare.rounds 200      shakespeare.cohort 66       shakespeare.local_epochs 1
shakespeare.batch_size 10    shakespeare.fedavg.clip .3   shakespeare.rec.std .1      shakespeare.n_clients 660   shakespeare.n_characters 80
shakespeare.context 80       shakespeare.fedavg.sigma.eps3 2.15  shakespeare.rec.c.eps3 1.435/1.36  shakespeare.n_runs 3/4
solr.client_lr 316.22776601683796  solr.server_lr .5623413251903491  solr.server_momentum .9  solr.cohort 60     solr.local_epochs 1
solr.batch_size 100          solr.rounds 1500             solr.fedavg.clip .05        solr.rec.std .05            solr.fedavg.sigma.eps1 .957
solr.rec.c.eps1 1.227        solr.rec.groups 6            solr.n_features 10000       solr.n_tags 500             solr.n_clients 342477
solr.n_runs 2                solr.evaluation.curve 10000
mean.d 200                   mean.n 10000                 mean.bits 1                 mean.delta .00001
"""


def test_every_stated_setting_equals_its_second_typing():
    words, second = HYPERS.split(), {}
    for name, text in zip(words[::2], words[1::2], strict=True):
        arxiv, slash, iclr = text.partition("/")
        for version, v in (("both", arxiv),) if not slash else (("arxiv", arxiv), ("iclr", iclr)):
            if v: second[(*name.split(".", 1), version)] = float(v)
    stated = [h for h in papers.paper("dprec").hypers if h.source == "stated" and papers.is_number(h.value)]
    assert {(h.task, h.name, h.version): float(h.value) for h in stated} == second


def test_tolerances_follow_their_rule():
    for c in papers.cells("dprec"):
        assert c.set_on == date(2026, 11, 20)
        if c.kind == "stochastic" and c.unit == "percent":
            assert c.tol == pytest.approx(max(2 * (c.spread or 0), 1.0)), c.key
        if c.key.endswith(".comm"):
            digits = len(str(c.value).partition(".")[2])
            assert c.tol == pytest.approx(.5 * 10**-digits) and c.unit == "GiB (printed GB)", c.key


def test_orderings_agree_with_the_printed_values():
    found = {c.key: c for c in papers.cells("dprec")}
    pairs = [c for c in found.values() if c.above]
    assert len(pairs) == 4
    for c in pairs: assert found[c.above].value - found[c.below].value == pytest.approx(c.value)


def test_versions_of_a_setting():
    assert papers.hyper("dprec", "rec.c.eps3", "mnist").value == .545
    assert papers.hyper("dprec", "rec.c.eps3", "mnist", version="iclr").value == .5
    assert papers.hyper("dprec", "rec.groups", "solr").value == 6, "the task's own setting comes first"
    assert papers.hyper("dprec", "rec.groups", "mnist").task == "all"
    for h in papers.paper("dprec").hypers:
        for version in ("arxiv", "iclr") if h.version == "both" else (h.version,):
            assert papers.hyper("dprec", h.name, h.task, version=version) == h


def test_what_was_deduced_is_not_called_stated():
    for task in ("mnist", "femnist", "shakespeare", "solr"):
        assert papers.hyper("dprec", "n_params", task).source == "inferred"
    assert papers.hyper("dprec", "server_adam_eps", "mnist").source == "ours"


@pytest.mark.parametrize("call, near", [
    (lambda: papers.paper("dp-rec"), "dprec"),
    (lambda: papers.cell("dprec", "mnist.eps3.rec.acx"), "mnist.eps3.rec.acc"),
    (lambda: papers.cells("dprec", "tabel1"), "table1"),
    (lambda: papers.hyper("dprec", "batchsize", "mnist"), "batch_size"),
    (lambda: papers.hyper("dprec", "rounds", "mnits"), "mnist"),
    (lambda: papers.hyper("dprec", "rounds", "mnist", version="icrl"), "iclr"),
])
def test_unknown_names_get_the_nearest(call, near):
    with pytest.raises(ValueError, match=f"did you mean '{re.escape(near)}'"): call()


def test_a_setting_that_differs_by_task_needs_the_task():
    with pytest.raises(ValueError, match="name one"): papers.hyper("dprec", "rounds")


def test_a_refusal_names_the_value_and_the_nearest():
    text = str(papers.refuse("name", "abd", [f"x{i}" for i in range(20)] + ["abc"]))
    assert text.startswith("name='abd' is not one of x0, ") and "(21 in all)" in text and text.endswith("did you mean 'abc'?")
    assert str(papers.refuse("id", "x", ())) == "id='x' is not one of "


def test_trouble_is_empty_for_a_good_cell():
    keys = [c.key for c in papers.cells("dprec")]
    assert {papers.trouble(c, keys) for c in papers.cells("dprec")} == {""}
    assert "did you mean" in papers.trouble(papers.cell("dprec", "mnist.ratio"), ["mnist.ratio"])


def test_records_cannot_be_changed():
    paper = papers.paper("dprec")
    assert isinstance(paper, papers.Paper) and all(isinstance(h, papers.Hyper) for h in paper.hypers)
    for record in (paper, paper.cells[0], paper.hypers[0]):
        with pytest.raises(AttributeError): record.note = "x"


GOOD = (papers.assets("papers") / "dprec.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("old, new, message", [
    ("value = 69.5\n", "value = nan\n", "finite"),
    ("value = 69.5\n", 'value = "69.5"\n', "finite"),
    ("spread = 1.5\n", "spread = -1.5\n", "finite number >= 0"),
    ("tol = 3.0\n", "tol = 0.0\n", "tol=0.0, allowed > 0"),
    ("tol = 3.0\n", "", "'tol' is missing"),
    ("tol = 3.0\n", "toll = 3.0\n", "did you mean 'tol'"),
    ('[[cell]]\nkey = "mnist.eps3.rec.acc"', '[[cell]]\nkey = "mnist.eps3.fedavg.acc"', "stands twice"),
    ('kind = "stochastic"', 'kind = "random"', "did you mean"),
    ('kind = "stochastic"', 'kind = "ordering"', "only an ordering"),
    ('above = "mnist.eps3.fedavg.acc"', 'above = "mnist.eps3.fedavg.ac"', "did you mean 'mnist.eps3.fedavg.acc'"),
    ('source = "stated"', 'source = "guessed"', "source='guessed'"),
    ('venue = ', 'venu = ', "'venue'"),
    ("[[cell]]", "[[cel]]", "did you mean 'cell'"),
    ('key = "iclr.mnist.eps3.rec.acc"', 'key = "iclrmnist.eps3.rec.acc"', "begin with 'iclr.'"),
    ("[[cell]]", '[[cause]]\nkey = "mnist.eps3.rek.acc"\ntext = "x"\n\n[[cell]]', "did you mean 'mnist.eps3.rec.acc'"),
])
def test_a_bad_file_is_refused(old, new, message):
    assert old in GOOD
    with pytest.raises(ValueError, match=re.escape(message)): papers.parse(GOOD.replace(old, new, 1), "dprec.toml")


def test_the_file_is_read_from_the_folder_given(tmp_path):
    (tmp_path / "other.toml").write_text(GOOD.replace('id = "dprec"', 'id = "other"'), encoding="utf-8")
    assert papers.papers(tmp_path) == ("other",)
    assert len(papers.paper("other", tmp_path).cells) == len(tomllib.loads(GOOD)["cell"])


# ---- I-MVU: no printed accuracies; the settings of its appendix C and of section 4, typed a second time

IMVU = """
femnist imvu.eps            0.25 0.5 0.75 1 2 3 5 6 7 8 9 10
femnist imvu.server_lr      0.5 1 2
femnist imvu.beta           32 64 128
femnist gaussian.sigma      0.6 0.8 1 2 4 6 8 10 16 20 24 32 40 50 60 64 70 80 90 100 110 120 128
femnist gaussian.server_lr  0.5 1 2
femnist gaussian.clip       0.1 0.5 1 2 10
femnist signsgd.sigma       0.6 0.8 1 2 4 6 8 10 16 32 64 128
femnist signsgd.server_lr   0.0001 0.001 0.01
femnist signsgd.clip        0.5 1 2
femnist client_lr 0.1
femnist client_momentum 0
femnist server_momentum 0.9
femnist cohort 5
femnist n_clients 3500
femnist n_train_clients 3150
femnist n_test_clients 350
femnist n_classes 62
all delta 1e-5
all bits 1
mnist local_steps 1
cifar10 local_steps 1
"""


def test_every_stated_setting_of_imvu_equals_its_second_typing():
    second = {tuple(words[:2]): tuple(map(float, words[2:])) for words in map(str.split, IMVU.strip().splitlines())}
    stated = {(h.task, h.name): tuple(map(float, np.atleast_1d(h.value))) for h in papers.paper("imvu").hypers
              if h.source == "stated" and not isinstance(h.value, str)}
    assert stated == second


def test_every_cell_of_imvu_is_an_inequality_with_its_words():
    cells = papers.cells("imvu")
    assert {c.table for c in cells} == {"fig2", "fig3", "fig4"}
    for c in cells:
        assert c.kind == "ordering" and c.bound == "above" and c.value in (-1.0, 0.0) and "'" in c.where and c.set_on == date(2026, 11, 21)
        assert (c.value == -1.0) == ("gaussian" in c.key or "b4" in c.key)


def test_the_grids_of_imvu_are_ours_and_say_so():
    for task in ("mnist", "cifar10"):
        budgets = papers.hyper("imvu", "budgets", task).value
        keys = {c.key for c in papers.cells("imvu", "fig2") if c.key.startswith(task)}
        assert keys == {f"{task}.imvu_minus_{other}.eps{b:g}" for other in ("gaussian", "signsgd", "mvu") for b in budgets}
        for name in ("epochs", "sigma", "step", "clip"):
            found = papers.hyper("imvu", name, task)
            assert found.source == "ours" and "MVU paper" in found.where
