"""The transcriptions: a second, independent typing compared with the TOML, and the
checks that guard the files.
"""

import dataclasses
import re
import tomllib
from datetime import date

import numpy as np
import pytest
from tables import tabled

from dpcomm.core.files import is_number
from dpcomm.evidence import paper_tables

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
cifar10.training_share 70
femnist.local3.fedavg.acc 68.9   femnist.local3.rec.acc 63.4      femnist.local1.fedavg.acc 60.1   femnist.local1.rec.acc 57.4
femnist.local3.loss 5.5          femnist.local1.loss 2.7          femnist.local.ratio 72.5
mnist.ratio 4300                 solr.ratio 105                   femnist.ratio 18
femnist.ratio_at_accuracy 8.4    mnist.ratio_at_accuracy 1705     extra_eps.low 2                  extra_eps.high 2.4
femnist.eps1.reduction 6.5       index.equivalent 4000            solr.participation 26
solr.test_samples 16586035       solr.test_samples.main_text 1600000
mean.chen.mse 0.07               mean.rec_poor_prior.mse 0.3      mean.rec_good_prior.mse 0.03
mean.chen_public_randomness.mse 10  mean.bits 21                  mnist.eps3.quant8.acc 58
mnist.eps3.quant8.order 11.5
iclr.femnist.ratio_at_accuracy 8.3  iclr.mnist.ratio_at_accuracy 1533  iclr.extra_eps.low 1.9      iclr.extra_eps.high 2.2
mnist.eps3.order 12.6            mnist.eps6.order 6.3             mnist.fedavg.order 7.9           mnist.rec.order 14.2
"""
EPSILON = "mnist 3 6   femnist 1 3 6   shakespeare 3   solr 1"
WRITER = """
eps1.order 6.3              eps3.order 7.5              eps6.order 6.4
fedavg.eps3_over_eps1 8.6   fedavg.eps6_over_eps3 1     rec.eps3_over_eps1 7.4      rec.eps6_over_eps3 2.1
eps3.ddg16_over_ddg12 47    eps6.ddg16_over_ddg12 6     eps3.ddg16_vs_rec 4.9       eps6.ddg16_vs_rec 7.8
eps3.ddg12_vs_rec 42.1      eps6.ddg12_vs_rec 1.8       eps3.fedavg_over_ddg16 2.6  eps6.ddg16_over_fedavg 1.4
only.fedavg_over_rec64 2.14 only.rec64_over_rec 3.45    only.rec_over_private 11.49
local3.order 5.5            local1.order 2.7            local.smaller_gap3 2        local.smaller_gap1 3.6
bits.4_to_7 0               bits.7_vs_none 0
"""


def number(text):
    value, _, spread = text.lstrip("~").partition("+-")
    return float(value), float(spread) if spread else None


def second_typing():
    """key -> (value, spread, n_runs) of the second typing; n_runs is '?' where a block
    does not say.
    """
    found = {}
    for line in filter(None, (TABLE_1 + ICLR_TABLE_1).splitlines()):
        parts = [p.split() for p in line.split("|")]
        if not line.startswith(" "):
            task, methods, runs = parts[0][0], parts[1], parts[2]
            continue
        row = parts[0][0].split(".")
        for method, n, text in zip(methods, runs, parts[1], strict=True):
            if text == "-":
                continue
            key = ".".join([task, *row[:-1], method, row[-1]])
            n = None if row[-1] == "comm" or n == "-" else int(n)
            found[key] = (*number(text), n)
    for line in TABLE_2.strip().splitlines():
        task, *values = line.split()
        names = "clients", "samples", "client_size.mean", "client_size.std"
        for name, v in zip(names, values, strict=True):
            found[f"{task}.{name}"] = (float(v), None, None)
    for prefix, table in (("", TABLE_3), ("iclr.", ICLR_TABLE_3)):
        for line in table.strip().splitlines():
            name, *values = line.split()
            for kind, v in zip(("acc", "comm"), values):
                n = (4 if prefix else 3) if "+-" in v else None
                found[f"{prefix}femnist.only.{name}.{kind}"] = (*number(v), n)
    for word in EPSILON.split():
        if not word.isdigit():
            task = word
        else:
            found |= {
                f"{task}.eps{word}.{kind}.eps": (float(word), None, None)
                for kind in ("fedavg", "rec")
            }
    words = WRITER.split()
    words = SINGLE.split() + [
        w if i % 2 else f"writer.{w}" for i, w in enumerate(words)
    ]
    pairs = zip(words[::2], words[1::2], strict=True)
    return found | {k: (float(v), None, None) for k, v in pairs}


def test_every_number_equals_its_second_typing():
    first = {
        c.key: (float(c.value), c.spread, c.n_runs) for c in paper_tables.cells("dprec")
    }
    assert first == second_typing()


def test_a_tilde_is_a_reading_error():
    tildes = {m for line in TABLE_1.splitlines() for m in re.findall(r"~(\d+)", line)}
    marked = {str(c.value) for c in paper_tables.cells("dprec", "table1") if c.read_err}
    assert marked == tildes


# task.name arXiv [ICLR]; one value where both texts agree
HYPERS = """
mnist.client_lr .01          mnist.server_lr .002         mnist.server_beta1 .9       mnist.server_beta2 .999     mnist.rounds 1000
mnist.cohort 10              mnist.local_epochs 1         mnist.batch_size 20         mnist.fedavg.clip .01       mnist.rec.std .005
mnist.fedavg.sigma.eps3 3.8  mnist.fedavg.sigma.eps6 2.15 mnist.rec.c.eps3 .545/.5    mnist.rec.c.eps6 .87/.7625  mnist.n_clients 100
mnist.partition.alpha 1      mnist.n_train 50000          all.rec.bits 7              all.delta.exponent 1.1      mnist.fedavg.n_runs 3/
mnist.rec.n_runs 10/         mnist.n_runs /4              mnist.rec.n_runs.eps3 /11   mnist.quant8.bits 8
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


def paper_setting(paper):
    return [h for h in paper_tables.paper(paper).hypers if h.source == "stated"]


def test_every_stated_setting_equals_its_second_typing():
    words, second = HYPERS.split(), {}
    for name, text in zip(words[::2], words[1::2], strict=True):
        arxiv, slash, iclr = text.partition("/")
        versions = dict(arxiv=arxiv, iclr=iclr) if slash else dict(both=arxiv)
        for version, v in versions.items():
            if v:
                second[(*name.split(".", 1), version)] = float(v)
    found = [h for h in paper_setting("dprec") if is_number(h.value)]
    assert {(h.task, h.name, h.version): float(h.value) for h in found} == second


def test_tolerances_follow_their_rule():
    for c in paper_tables.cells("dprec"):
        if c.set_on == date(2026, 11, 26):
            assert c.kind == "shown" and c.tol == 0
            continue
        later = c.table in ("c2", "by_writer") or c.key == "mnist.eps3.quant8.order"
        assert c.set_on == date(2026, 11, 22 if later else 20)
        if c.table == "c2":
            assert (c.tol, c.unit, c.kind) == (0.5, "eps", "exact")
            assert isinstance(c.value, int)
        if c.kind == "stochastic" and c.unit == "percent":
            assert c.tol == pytest.approx(max(2 * (c.spread or 0), 1.0)), c.key
        if c.key.endswith(".comm"):
            digits = len(str(c.value).partition(".")[2])
            assert c.tol == pytest.approx(0.5 * 10**-digits), c.key
            assert c.unit == "GiB (printed GB)", c.key


def test_orderings_agree_with_the_printed_values():
    found = {c.key: c for c in paper_tables.cells("dprec")}
    pairs = [c for c in found.values() if c.above]
    orderings = [c for c in found.values() if c.kind == "ordering" and not c.bound]
    assert len(pairs) == 5 + 22 and pairs == orderings
    for c in pairs:
        assert found[c.above].value - found[c.below].value == pytest.approx(c.value)


def test_versions_of_a_setting():
    assert paper_tables.hyper("dprec", "rec.c.eps3", "mnist").value == 0.545
    assert (
        paper_tables.hyper("dprec", "rec.c.eps3", "mnist", version="iclr").value == 0.5
    )
    own = paper_tables.hyper("dprec", "rec.groups", "solr")
    assert own.value == 6, "the task's own setting comes first"
    assert paper_tables.hyper("dprec", "rec.groups", "mnist").task == "all"
    for h in paper_tables.paper("dprec").hypers:
        for version in ("arxiv", "iclr") if h.version == "both" else (h.version,):
            assert paper_tables.hyper("dprec", h.name, h.task, version=version) == h


@tabled(
    "call, near",
    [
        (lambda: paper_tables.paper("dp-rec"), "dprec"),
        (
            lambda: paper_tables.cell("dprec", "mnist.eps3.rec.acx"),
            "mnist.eps3.rec.acc",
        ),
        (lambda: paper_tables.cells("dprec", "tabel1"), "table1"),
        (lambda: paper_tables.hyper("dprec", "batchsize", "mnist"), "batch_size"),
        (lambda: paper_tables.hyper("dprec", "rounds", "mnits"), "mnist"),
        (
            lambda: paper_tables.hyper("dprec", "rounds", "mnist", version="icrl"),
            "iclr",
        ),
    ],
)
def test_unknown_names_get_the_nearest(call, near):
    with pytest.raises(ValueError, match=f"did you mean '{re.escape(near)}'"):
        call()


def test_a_setting_that_differs_by_task_needs_the_task():
    with pytest.raises(ValueError, match="choose one"):
        paper_tables.hyper("dprec", "rounds")


FED = "mnist.eps3.fedavg.acc"
GOOD = (paper_tables.assets("papers") / "dprec.toml").read_text(encoding="utf-8")


@tabled(
    "old, new, message",
    [
        ("value = 69.5\n", "value = nan\n", "finite"),
        ("value = 69.5\n", 'value = "69.5"\n', "finite"),
        ("spread = 1.5\n", "spread = -1.5\n", "finite number >= 0"),
        ("tol = 3.0\n", "tol = 0.0\n", "tol=0.0, allowed > 0"),
        ("tol = 3.0\n", "", "'tol' is missing"),
        ("tol = 3.0\n", "toll = 3.0\n", "did you mean 'tol'"),
        (
            '[[cell]]\nkey = "mnist.eps3.rec.acc"',
            f'[[cell]]\nkey = "{FED}"',
            "appears twice",
        ),
        ('kind = "stochastic"', 'kind = "random"', "did you mean"),
        ('kind = "stochastic"', 'kind = "ordering"', "only an ordering"),
        (f'above = "{FED}"', 'above = "mnist.eps3.fedavg.ac"', f"did you mean '{FED}'"),
        ('source = "stated"', 'source = "guessed"', "source='guessed'"),
        ("venue = ", "venu = ", "'venue'"),
        ("[[cell]]", "[[cel]]", "did you mean 'cell'"),
        (
            'key = "iclr.mnist.eps3.rec',
            'key = "iclrmnist.eps3.rec',
            "begin with 'iclr.'",
        ),
        (
            "[[cell]]",
            '[[cause]]\nkey = "mnist.eps3.rek.acc"\ntext = "x"\n\n[[cell]]',
            "did you mean 'mnist.eps3.rec.acc'",
        ),
    ],
)
def test_a_bad_file_is_refused(old, new, message):
    assert old in GOOD
    with pytest.raises(ValueError, match=re.escape(message)):
        paper_tables.parse(GOOD.replace(old, new, 1), "dprec.toml")


def test_the_file_is_read_from_the_folder_given(tmp_path):
    other = GOOD.replace('id = "dprec"', 'id = "other"')
    (tmp_path / "other.toml").write_text(other, encoding="utf-8")
    assert paper_tables.papers(tmp_path) == ("other",)
    cells = paper_tables.paper("other", tmp_path).cells
    assert len(cells) == len(tomllib.loads(GOOD)["cell"])


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


def test_the_one_accuracy_that_imvu_prints():
    (c,) = paper_tables.cells("imvu", "text")
    what = c.key, c.value, c.unit, c.better
    assert what == ("femnist.plain.acc", 84, "percent", "higher")
    assert (c.kind, c.tol, c.spread, c.how) == ("stochastic", 1.0, None, "typed")
    assert "84% accuracy when trained non-privately" in c.where
    assert c.set_on == date(2026, 11, 23)


def test_every_other_cell_of_imvu_is_an_inequality_with_its_words():
    cells = [c for c in paper_tables.cells("imvu") if c.table != "text"]
    assert {c.table for c in cells} == {"fig2", "fig3", "fig4"}
    for c in cells:
        assert (c.kind, c.bound) == ("ordering", "above") and "'" in c.where
        assert c.value in (-1.0, 0.0) and c.set_on == date(2026, 11, 21)
        assert (c.value == -1.0) == ("gaussian" in c.key or "b4" in c.key)


# ---- FL-TOP: its ten tables, typed a second time in the paper's order and with its words

FLTOP_8 = """
0.1%
FL-BASIC        0.14  111  12308.94  12.31
FL-BAS-2        0.16  185  20514.9   20.51
FL-BAS-3        0.27  200  22.17     22.17
FL-BAS-4        0.17  200  22.17     22.17
FL-CS           0.37  200  22178.27  22.17
FL-TOPK-BIS     0.59  198  21.95     21.95
FL-TOP          0.78  199  22.06     22.06
FL-BASIC-DP     0.14  167  18518.85  18.51   0.95
FL-BAS-2-DP     0.14  124  13750.53  13.75   0.88
FL-BAS-3-DP     -
FL-BAS-4-DP     0.15  137  15.19     15.19   0.90
FL-CS-DP        0.36  197  21845.59  21.84   1
FL-TOPK-BIS-DP  0.59  196  21.73     21.73   0.99
FL-TOP-DP       0.76  199  22.06     22.06   1
0.5%
FL-BASIC        0.65  193  21402.03  107
FL-BAS-2        0.46  196  21734.70  108.66
FL-BAS-3        0.73  200  110.88    110.88
FL-BAS-4        0.41  197  109.22    109.22
FL-CS           0.57  185  20514.9   102.56
FL-TOPK-BIS     0.76  200  110.88    110.88
FL-TOP          0.82  200  110.88    110.88
FL-BASIC-DP     0.59  200  22178.27  110.88  1
FL-BAS-2-DP     0.38  200  22178.27  110.88  1
FL-BAS-3-DP     0.56  200  110.88    110.88  1
FL-BAS-4-DP     0.33  200  110.88    110.88  1
FL-CS-DP        0.53  200  22178.27  110.88  1
FL-TOPK-BIS-DP  0.68  184  102.01    102.01  0.97
FL-TOP-DP       0.81  200  110.88    110.88  1
1%
FL-BASIC        0.71  194  21512.92  215.12
FL-BAS-2        0.59  200  22178.27  221.77
FL-BAS-3        0.76  200  221.77    221.77
FL-BAS-4        0.56  195  216.23    216.23
FL-CS           0.69  200  22178.27  221.77
FL-TOPK-BIS     0.79  197  218.45    218.45
FL-TOP          0.83  200  221.77    221.77
FL-BASIC-DP     0.65  197  21845.59  218.45  1
FL-BAS-2-DP     0.62  198  21956.48  219.56  1
FL-BAS-3-DP     0.66  198  219.56    219.56  1
FL-BAS-4-DP     0.52  198  219.56    219.56  1
FL-CS-DP        0.66  189  20958.46  209.58  0.98
FL-TOPK-BIS-DP  0.70  174  192.94    192.94  0.96
FL-TOP-DP       0.81  183  202.92    202.92  0.97
5%
FL-BASIC        0.78  196  21734.70  1086.73
FL-BAS-2        0.72  199  22067.38  1103.36
FL-BAS-3        0.81  199  1103.36   1103.36
FL-BAS-4        0.76  196  1086.73   1086.73
FL-CS           0.82  200  22178.27  1108.91
FL-TOPK-BIS     0.83  196  1086.73   1086.73
FL-TOP          0.84  200  1108.91   1108.91
FL-BASIC-DP     0.76  195  21623.81  1081.18  0.99
FL-BAS-2-DP     0.72  195  21623.81  1081.18  0.99
FL-BAS-3-DP     0.76  199  1103.36   1103.36  1
FL-BAS-4-DP     0.75  191  1059.01   1059.01  0.99
FL-CS-DP        0.78  160  17742.61  887.13   0.94
FL-TOPK-BIS-DP  0.71  152  842.77    842.77   0.92
FL-TOP-DP       0.81  152  842.77    842.77   0.92
10%
FL-BASIC        0.81  196  21734.70  2173.47
FL-BAS-2        0.78  199  22067.38  2206.74
FL-BAS-3        0.82  195  2162.38   2162.38
FL-BAS-4        0.79  200  2217.83   2217.83
FL-CS           0.85  182  20182.22  2018.22
FL-TOPK-BIS     0.84  196  2173.47   2173.47
FL-TOP          0.85  199  2206.74   2206.74
FL-BASIC-DP     0.79  189  20958.46  2095.85  0.98
FL-BAS-2-DP     0.77  189  20958.46  2095.85  0.98
FL-BAS-3-DP     0.79  183  2029.31   2029.31  0.97
FL-BAS-4-DP     0.78  195  2162.38   2162.38  0.99
FL-CS-DP        0.72  167  18518.85  1851.89  0.95
FL-TOPK-BIS-DP  0.69  138  1530.30   1530.30  0.90
FL-TOP-DP       0.80  157  1740.99   1740.99  0.93
100%
FL-STD          0.86  200  22178.27  22178.27
FL-STD-DP       0.56  60   6653.48   6653.48  0.76
"""
FLTOP_9 = """
0.01%
FL-BASIC       0.49  0.45  100  11948.91  1.19
FL-BAS-2       0.49  0.45  94   11231.98  1.12
FL-BAS-3       0.49  0.45  81   0.96      0.96
FL-BAS-4       0.49  0.49  100  1.19      1.19
FL-CS          -
FL-TOP-Bis     0.59  0.63  100  1.19      1.19
FL-TOP         0.64  0.70  60   0.71      0.71
FL-BASIC-DP    0.49  0.45  6    716.93    0.07  0.74
FL-BAS-2-DP    0.49  0.45  100  11948.91  1.19  1
FL-BAS-3-DP    0.49  0.45  95   1.13      1.13  0.99
FL-BAS-4-DP    0.49  0.47  96   1.14      1.14  0.99
FL-CS-DP       -
FL-TOP-Bis-DP  0.59  0.63  94   1.12      1.12  0.99
FL-TOP-DP      0.64  0.70  100  1.19      1.19  1
0.05%
FL-BASIC       0.50  0.48  100  11948.91  5.97
FL-BAS-2       0.49  0.46  100  11948.91  5.97
FL-BAS-3       0.51  0.49  100  5.97      5.97
FL-BAS-4       0.51  0.52  57   3.40      3.40
FL-CS          0.51  0.50  100  11948.91  5.97
FL-TOP-Bis     0.68  0.75  92   5.49      5.49
FL-TOP         0.68  0.75  54   3.22      3.22
FL-BASIC-DP    0.49  0.46  84   10037.08  5.02  0.96
FL-BAS-2-DP    0.49  0.46  100  11948.91  5.97  1
FL-BAS-3-DP    0.50  0.48  99   5.91      5.91  1
FL-BAS-4-DP    0.52  0.51  100  5.97      5.97  1
FL-CS-DP       0.49  0.48  100  11948.91  5.97  1
FL-TOP-Bis-DP  0.68  0.75  92   5.49      5.49  0.98
FL-TOP-DP      0.68  0.75  99   5.91      5.91  1
0.1%
FL-BASIC       0.51  0.51  99   11829.42  11.82
FL-BAS-2       0.50  0.47  100  11948.91  11.94
FL-BAS-3       0.53  0.53  100  11.94     11.94
FL-BAS-4       0.50  0.53  94   11.23     11.23
FL-CS          0.53  0.55  100  11948.91  11.94
FL-TOP-Bis     0.69  0.76  100  11.94     11.94
FL-TOP         0.69  0.76  68   8.12      8.12
FL-BASIC-DP    0.50  0.49  100  11948.91  11.94  1
FL-BAS-2-DP    0.50  0.47  100  11948.91  11.94  1
FL-BAS-3-DP    0.55  0.56  100  11.94     11.94  1
FL-BAS-4-DP    0.51  0.52  100  11.94     11.94  1
FL-CS-DP       0.51  0.51  99   11829.42  11.82  1
FL-TOP-Bis-DP  0.68  0.75  89   10.63     10.63  0.98
FL-TOP-DP      0.69  0.76  85   10.15     10.15  0.97
0.5%
FL-BASIC       0.58  0.68  100  11948.91  59.74
FL-BAS-2       0.56  0.58  99   11829.42  59.15
FL-BAS-3       0.61  0.68  100  59.74     59.74
FL-BAS-4       0.56  0.59  100  59.74     59.74
FL-CS          0.66  0.71  100  11948.91  59.74
FL-TOP-Bis     0.71  0.78  100  59.74     59.74
FL-TOP         0.71  0.79  95   56.76     56.76
FL-BASIC-DP    0.57  0.64  100  11948.91  59.74  1
FL-BAS-2-DP    0.57  0.59  100  11948.91  59.74  1
FL-BAS-3-DP    0.58  0.67  100  59.74     59.74  1
FL-BAS-4-DP    0.54  0.57  34   20.31     20.31  0.83
FL-CS-DP       0.61  0.68  100  11948.91  59.74  1
FL-TOP-Bis-DP  0.68  0.75  55   32.86     32.86  0.89
FL-TOP-DP      0.69  0.76  24   14.34     14.34  0.80
"""
FLTOP_10 = """
1%
FL-BASIC       0.64  0.72  100  11948.91  119.49
FL-BAS-2       0.62  0.66  100  11948.91  119.49
FL-BAS-3       0.62  0.66  85   101.57    101.57
FL-BAS-4       0.56  0.59  100  119.49    119.49
FL-CS          0.68  0.75  100  11948.91  119.49
FL-TOP-Bis     0.72  0.79  100  119.49    119.49
FL-TOP         0.72  0.79  58   69.30     69.30
FL-BASIC-DP    0.64  0.70  100  11948.91  119.49  1
FL-BAS-2-DP    0.62  0.67  100  11948.91  119.49  1
FL-BAS-3-DP    0.61  0.71  100  119.49    119.49  1
FL-BAS-4-DP    0.57  0.66  100  119.49    119.49  1
FL-CS-DP       0.66  0.72  100  11948.91  119.49  1
FL-TOP-Bis-DP  0.68  0.74  53   63.33     63.33   0.89
FL-TOP-DP      0.69  0.76  22   26.29     26.29   0.79
5%
FL-BASIC       0.72  0.80  100  11948.91  597.45
FL-BAS-2       0.68  0.75  100  11948.91  597.45
FL-BAS-3       0.69  0.76  98   585.5     585.5
FL-BAS-4       0.66  0.72  100  597.45    597.45
FL-CS          0.73  0.81  98   11709.93  585.5
FL-TOP-Bis     0.72  0.79  100  597.45    597.45
FL-TOP         0.72  0.80  95   567.57    567.57
FL-BASIC-DP    0.69  0.76  100  11948.91  597.45  1
FL-BAS-2-DP    0.68  0.75  98   11709.93  585.5   1
FL-BAS-3-DP    0.65  0.71  90   537.70    537.70  0.98
FL-BAS-4-DP    0.67  0.74  98   585.5     585.5   1
FL-CS-DP       0.69  0.76  100  11948.91  597.45  1
FL-TOP-Bis-DP  0.67  0.74  38   227.03    227.03  0.84
FL-TOP-DP      0.68  0.75  23   137.41    137.41  0.79
10%
FL-BASIC       0.74  0.81  100  11948.91  1194.89
FL-BAS-2       0.70  0.77  100  11948.91  1194.89
FL-BAS-3       0.72  0.80  98   1170.99   1170.99
FL-BAS-4       0.70  0.77  99   1182.94   1182.94
FL-CS          0.74  0.82  100  11948.91  1194.89
FL-TOP-Bis     0.72  0.80  100  1194.89   1194.89
FL-TOP         0.74  0.82  90   1075.40   1075.40
FL-BASIC-DP    0.69  0.76  99   11829.42  1182.94  1
FL-BAS-2-DP    0.69  0.76  95   11351.46  1135.15  0.99
FL-BAS-3-DP    0.69  0.76  95   1135.15   1135.15  0.99
FL-BAS-4-DP    0.69  0.76  100  1194.89   1194.89  1
FL-CS-DP       0.69  0.76  96   11470.95  1147.09  0.99
FL-TOP-Bis-DP  0.67  0.73  37   442.11    442.11   0.84
FL-TOP-DP      0.68  0.74  23   274.82    274.82   0.79
100%
FL-STD         0.74  0.82  99   11829.42  11829.42
FL-STD-DP      0.66  0.72  62   7408.32   7408.32  0.91
"""
FLTOP_1 = """
0.5%
FL-BASIC     0.65  193  21402.03  107
FL-CS        0.57  185  20514.9   102.56
FL-TOP       0.82  200  110.88    110.88
FL-BASIC-DP  0.59  200  22178.27  110.88  1
FL-CS-DP     0.53  200  22178.27  110.88  1
FL-TOP-DP    0.81  200  110.88    110.88  1
5%
FL-BASIC     0.78  196  21734.70  1086.73
FL-CS        0.82  200  22178.27  1108.91
FL-TOP       0.84  200  1108.91   1108.91
FL-BASIC-DP  0.76  195  21623.81  1081.18  0.99
FL-CS-DP     0.78  160  17742.61  887.13   0.94
FL-TOP-DP    0.81  152  842.77    842.77   0.92
10%
FL-BASIC     0.81  196  21734.70  2173.47
FL-CS        0.85  182  20182.22  2018.22
FL-TOP       0.85  199  2206.74   2206.74
FL-BASIC-DP  0.79  189  20958.46  2095.85  0.98
FL-CS-DP     0.72  167  18518.85  1851.89  0.95
FL-TOP-DP    0.80  157  1740.99   1740.99  0.93
100%
FL-STD       0.86  200  22178.27  22178.27
FL-STD-DP    0.56  60   6653.48   6653.48  0.76
"""
FLTOP_2 = """
0.1%
FL-BASIC     0.51  0.51  99   11829.42  11.82
FL-CS        0.53  0.55  100  11948.91  11.94
FL-TOP       0.69  0.76  68   8.12      8.12
FL-BASIC-DP  0.50  0.49  100  11948.91  11.94  1
FL-CS-DP     0.51  0.51  99   11829.42  11.82  1
FL-TOP-DP    0.69  0.76  85   10.15     10.15  0.97
5%
FL-BASIC     0.72  0.80  100  11948.91  597.45
FL-CS        0.73  0.81  98   11709.93  585.5
FL-TOP       0.72  0.80  95   567.57    567.57
FL-BASIC-DP  0.69  0.76  100  11948.91  597.45  1
FL-CS-DP     0.69  0.76  100  11948.91  597.45  1
FL-TOP-DP    0.68  0.75  23   137.41    137.41  0.79
10%
FL-BASIC     0.74  0.81  100  11948.91  1194.89
FL-CS        0.74  0.82  100  11948.91  1194.89
FL-TOP       0.74  0.82  90   1075.40   1075.40
FL-BASIC-DP  0.69  0.76  99   11829.42  1182.94  1
FL-CS-DP     0.69  0.76  96   11470.95  1147.09  0.99
FL-TOP-DP    0.68  0.74  23   274.82    274.82   0.79
100%
FL-STD       0.74  0.82  99   11829.42  11829.42
FL-STD-DP    0.66  0.72  62   7408.32   7408.32  0.91
"""
FLTOP_6 = """
               0.1%  0.5%  1%    5%    10%
FL-BASIC-DP    0.05  0.12  0.16  0.34  0.45
FL-BAS-2-DP    0.07  0.16  0.23  0.52  0.75
FL-BAS-3-DP    0.05  0.11  0.16  0.33  0.44
FL-BAS-4-DP    0.06  0.15  0.21  0.51  0.74
FL-CS-DP       0.21  0.26  0.32  0.57  0.79
FL-TOP-BIS-DP  1.25  1.59  1.79  2.18  2.34
FL-TOP-DP      0.50  0.61  0.64  0.87  1.0
"""
FLTOP_7 = """
               0.01%  0.05%  0.1%   0.5%  1%    5%    10%
FL-BASIC-DP    0.01   0.03   0.05   0.11  0.16  0.34  0.46
FL-BAS-2-DP    0.01   0.03   0.04   0.09  0.14  0.31  0.44
FL-BAS-3-DP    0.01   0.04   0.06   0.12  0.18  0.35  0.49
FL-BAS-4-DP    0.02   0.03   0.05   0.12  0.15  0.31  0.44
FL-CS-DP       0.002  0.005  0.006  0.01  0.02  0.04  0.06
FL-TOP-BIS-DP  0.60   0.73   0.81   1.03  1.13  1.31  1.32
FL-TOP-DP      0.23   0.46   0.59   1.03  1.18  1.31  1.32
"""
FLTOP_SINGLE = """
fmnist.sensitivity.fl_std_dp.r100 2.40   medical.sensitivity.fl_std_dp.r100 1.40
medical.features.age.lowest 15           medical.features.age.highest 89
medical.features.mrci.lowest 2           medical.features.mrci.highest 60
medical.features.codes 24419             medical.features.total 24428            medical.features.kept 7280
medical.train.positive 32106             medical.train.negative 985280           medical.train.ratio 3.16          medical.train.total 1017386
medical.test.positive 7882               medical.test.negative 246465            medical.test.ratio 3.10           medical.test.total 254347
medical.records 1271733                  medical.split.records 1017386
fmnist.ratio.fl_std_fl_top.up 10         fmnist.ratio.fl_cs_fl_top.up .91        fmnist.ratio.fl_cs_fl_top.down 10
medical.ratio.fl_std_fl_top.up 11        medical.ratio.fl_cs_fl_top.down 11
fmnist.ratio.fl_basic_dp_fl_top_dp.down 189  fmnist.ratio.fl_basic_dp_fl_top_dp.up 18
fmnist.ratio.fl_std_fl_top.smallest 1000     fmnist.saved 99.9
medical.bis_less.bal_acc 8                   medical.bis_less.auroc 10
"""
FMNIST_COLUMNS = ("accuracy", "round", "down_kb", "up_kb", "eps")
MEDICAL_COLUMNS = ("bal_acc", "auroc", *FMNIST_COLUMNS[1:])


def scheme(words):
    "The paper's name of a scheme as a part of a key."
    return words.lower().replace("topk", "top").replace("-", "_")


def rows_of(table, task, columns):
    "key -> value of a typed table with a line for every compression ratio."
    found, ratio = {}, None
    for name, *numbers in map(str.split, table.strip().splitlines()):
        if name.endswith("%"):
            ratio = "r" + name[:-1]
        elif numbers != ["-"]:
            assert len(numbers) == len(columns) - (not name.endswith("-DP"))
            key = f"{task}.{scheme(name)}.{ratio}"
            found |= {f"{key}.{c}": float(v) for c, v in zip(columns, numbers)}
    return found


def sensitivities(table, task):
    "key -> value of Table 6 or 7."
    head, *lines = map(str.split, table.strip().splitlines())
    return {
        f"{task}.sensitivity.{scheme(name)}.r{r[:-1]}": float(v)
        for name, *values in lines
        for r, v in zip(head, values, strict=True)
    }


def test_every_number_of_fltop_equals_its_second_typing():
    words = FLTOP_SINGLE.split()
    second = rows_of(FLTOP_8, "fmnist", FMNIST_COLUMNS)
    for table in (FLTOP_9, FLTOP_10):
        second |= rows_of(table, "medical", MEDICAL_COLUMNS)
    second |= sensitivities(FLTOP_6, "fmnist") | sensitivities(FLTOP_7, "medical")
    second |= dict(zip(words[::2], map(float, words[1::2]), strict=True))
    stand_ins = paper_tables.paper("fltop").stand_ins
    cells = [c for c in paper_tables.cells("fltop") if c.table not in stand_ins]
    printed = [c for c in cells if c.kind != "ordering"]
    first = {c.key: float(c.value) for c in printed}
    assert first == second and len(second) == 972


@tabled(
    "table, task, typed",
    [("table1", "fmnist", FLTOP_1), ("table2", "medical", FLTOP_2)],
)
def test_the_main_tables_of_fltop_repeat_the_appendix(table, task, typed):
    "Tables 1 and 2, typed by themselves, are rows of Tables 8, 9 and 10."
    found = {c.key: float(c.value) for c in paper_tables.cells("fltop", table)}
    columns = FMNIST_COLUMNS if task == "fmnist" else MEDICAL_COLUMNS
    assert found == rows_of(typed, task, columns)
    assert len({key.rsplit(".", 1)[0] for key in found}) == 20


def test_rows_that_fltop_does_not_print():
    keys = {c.key for c in paper_tables.cells("fltop") if c.kind != "ordering"}
    for row in (
        "fmnist.fl_bas_3_dp.r0.1",
        "medical.fl_cs.r0.01",
        "medical.fl_cs_dp.r0.01",
    ):
        assert not any(key.startswith(f"{row}.") for key in keys)
    fails = paper_tables.cell("fltop", "fmnist.fl_bas_3_dp.r0.1.accuracy")
    cells = [
        c for c in paper_tables.cells("fltop", "table8") if c.key.endswith(".accuracy")
    ]
    printed = [c.value for c in cells if c != fails]
    assert (fails.kind, fails.bound, fails.value) == ("ordering", "below", min(printed))


def test_tolerances_of_fltop_follow_their_rule():
    rule = dict.fromkeys(("down_kb", "up_kb", "eps"), ("exact", 0.005))
    rule |= dict.fromkeys(("bal_acc", "auroc", "round"), ("shown", 0))
    rule["accuracy"] = ("stochastic", 0.02)
    later = {"fmnist.figure1.norm"}
    for c in paper_tables.cells("fltop"):
        if c.set_on == date(2026, 11, 26):
            assert c.kind == "shown" and c.tol == 0
            continue
        assert c.set_on == date(2026, 11, 23 if c.key in later else 21), c.key
        assert (c.kind == "shown") == (c.kind != "ordering" and c.tol == 0)
        if "sensitivity" in c.key and c.table == "table6":
            assert c.kind == "stochastic" and c.tol == pytest.approx(0.33 * c.value)
        elif "sensitivity" in c.key:
            assert c.kind == "shown", c.key
        elif c.table in ("table8", "table9", "table10") and c.kind != "ordering":
            column = c.key.rsplit(".", 1)[1]
            assert (c.kind, c.tol) == rule[column], c.key
            why = "by chance" if column == "round" else "other data"
            assert c.kind != "shown" or why in c.tol_why


def test_figure_1_of_fltop_says_which_norm_is_larger():
    (c,) = paper_tables.cells("fltop", "figure1")
    what = c.key, c.kind, c.bound, c.value
    assert what == ("fmnist.figure1.norm", "ordering", "above", 0)
    assert (c.unit, c.better, c.above, c.below) == ("norm", "higher", None, None)
    assert "tend to be larger than with FL-STD" in c.where


def test_orderings_of_fltop_agree_with_the_printed_values():
    found = {c.key: c for c in paper_tables.cells("fltop")}
    pairs = [c for c in found.values() if c.above]
    assert len(pairs) == 29 + 24 + 5 + 3 + 9 + 9 + 6 + 1
    for c in pairs:
        gap = found[c.above].value - found[c.below].value
        assert c.value > 0 and gap == pytest.approx(c.value), c.key


# Table 5 and the settings in the text, a second time; two values are Fashion-MNIST's and the medical data's
FLTOP_HYPERS = """
sampling_rate 1/60 100/5010   n_clients 6000 5010   rounds 200 100     local_steps 5 40    n_params 1663370 1496601
client_lr 0.215 0.1           cs.server_lr 0.35 1   cs.chunks 200 100  sigma 1.54 1.49     init_steps 5 40
client_size 10 203            public.batch 10 24    batch_size 10 -    public.patients - 356
n_features - 7280             test_share - 0.2      least_occurrences - 100
"""
FLTOP_ALL = (
    "delta 1e-5  cs.momentum 0.9  float_bits 32  sensitivity.repeats 100 "
    " client_lr.lowest 0.01  client_lr.highest 0.5  client_lr.step 0.005"
)


def test_every_stated_setting_of_fltop_equals_its_second_typing():
    words, rest = FLTOP_HYPERS.split(), FLTOP_ALL.split()
    pairs = zip(rest[::2], rest[1::2], strict=True)
    second = {("all", name): float(v) for name, v in pairs}
    for name, *values in zip(words[::3], words[1::3], words[2::3], strict=True):
        for task, text in zip(("fmnist", "medical"), values):
            if text != "-":
                above, _, below = text.partition("/")
                second[task, name] = float(above) / float(below or 1)
    found = [h for h in paper_setting("fltop") if is_number(h.value)]
    assert {(h.task, h.name): float(h.value) for h in found} == second
    assert paper_tables.hyper("fltop", "hidden", "medical").value == (200, 200)
    inferred = [
        h.name for h in paper_tables.paper("fltop").hypers if h.source == "inferred"
    ]
    assert {*inferred} == {"accountant", "support.size", "cohort"}


# ---- sqSGD: no printed accuracies; its settings and three counts, typed a second time

SQSGD = """
all clients 10
all batch_size 32
all epochs 50
all rounds_per_epoch 188
all server_lr .001
all alpha 1
all beta 1
all bound 10
all fraction .005
all levels.fig1 2 8 32
all levels.fig2 16
all levels.fig5 2 8 32 128
all ratios.fig4 .001 .005 .01 .05
all coin_share .1
all pm.share 2.5
mnist eps 200 300 400
emnist eps 200 300 400
fmnist eps 1000 2000 3000
mnist eps.fig1 400
emnist eps.fig1 400
fmnist eps.fig1 2000
mnist levels.fig3 16
emnist levels.fig3 16
fmnist levels.fig3 128
"""


@tabled("paper, typed", [("imvu", IMVU), ("sqsgd", SQSGD)])
def test_every_stated_setting_of_two_papers_equals_its_second_typing(paper, typed):
    lines = map(str.split, typed.strip().splitlines())
    second = {(task, name): [*map(float, values)] for task, name, *values in lines}
    found = [h for h in paper_setting(paper) if not isinstance(h.value, str)]
    first = {(h.task, h.name): [*map(float, np.atleast_1d(h.value))] for h in found}
    assert first == second


def test_what_sqsgd_trains():
    tasks = "mnist", "emnist", "fmnist"
    nets = [paper_tables.hyper("sqsgd", "model", task).value for task in tasks]
    assert nets == ["lenet5", "lenet5", "resnet110"]
    assert paper_tables.hyper("sqsgd", "momentum", "mnist").source == "inferred"


def test_every_cell_of_sqsgd_is_a_count_or_an_inequality_with_its_words():
    cells = {c.key: c for c in paper_tables.cells("sqsgd")}
    names = "model.lenet5.parameters", "model.resnet110.parameters", "rounds_per_epoch"
    assert [cells.pop(name).value for name in names] == [119_850, 1_722_224, 188]
    for c in cells.values():
        assert (c.kind, c.bound) == ("ordering", "above") and "'" in c.where
        assert c.set_on == date(2026, 11, 21)
        assert c.table in ("fig1", "fig2", "fig3", "fig4", "fig5")
        margins = {"fig1.bits": 1.0, "sqsgd_minus_pm": 1.0, "vqsgd_minus_sqsgd": -3.0}
        margins["sqsgd_minus_vqsgd"] = 10.0
        due = [margin for words, margin in margins.items() if words in c.key]
        assert [c.value] == (due or [0.0])


# ---- printed tables and numbers that are only shown

GRID = dict(
    key="a.{row}.{column}",
    where="Table 9, {row}, {column}",
    unit="kB",
    better="lower",
    how="typed",
    kind="exact",
    rel_tol=0.5,
    tol_why="half",
    set_on=date(2026, 11, 21),
    checked_by="nobody",
    table="table9",
    column={"acc": {"unit": "percent"}},
)


def test_a_printed_table_becomes_cells():
    text = "\n      acc   comm\nrec   69.50  -\n\nnone  82   0.01  table1 text\n"
    rows = paper_tables.expand(GRID | {"rows": text}, "x.toml")
    cells = [paper_tables.build(paper_tables.Cell, row, "x.toml") for row in rows]
    assert [(c.key, c.value, c.unit, c.tol, c.also) for c in cells] == [
        ("a.rec.acc", 69.5, "percent", 34.75, ()),
        ("a.none.acc", 82, "percent", 41.0, ("table1", "text")),
        ("a.none.comm", 0.01, "kB", 0.005, ("table1", "text")),
    ]
    assert cells[1].where == "Table 9, none, acc" and type(cells[1].value) is int
    assert paper_tables.grid_row(GRID, ["acc"], "rec", ["-"], "x.toml") == []
    numbers = [paper_tables.as_number(text, "x") for text in ("1", "1.0", "0.05")]
    assert numbers == [1, 1.0, 0.05] and [*map(type, numbers)] == [int, float, float]


@tabled(
    "change, message",
    [
        (dict(rows="acc comm\nrec 1"), "x.toml, rec: 1 words; write 2 numbers or -"),
        (dict(rows="acc\nrec 1 2"), "rec: 2 words"),
        (dict(rows="acc\nrec 1 -"), "rec: 2 words"),
        (dict(rows="acc\nrec 1,5"), "'1,5' is not a number"),
        (dict(rows="acc\nrec 1.5.2"), "'1.5.2' is not a number"),
        (dict(rows="ac\nrec 1"), "did you mean 'ac'"),
        (dict(), "'rows' is missing"),
    ],
)
def test_a_bad_printed_table_is_refused(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        paper_tables.expand(GRID | change, "x.toml")


@tabled(
    "kind, tol, message",
    [("shown", 1.0, "only shown"), ("exact", 0.0, "allowed > 0"), ("shown", 0.0, "")],
)
def test_what_is_only_shown_has_no_tolerance(kind, tol, message):
    c = paper_tables.cell("fltop", "fmnist.fl_top.r0.5.up_kb")
    c = dataclasses.replace(c, kind=kind, tol=tol)
    found = paper_tables.inconsistency(c, [c.key])
    assert message in found and bool(message) == bool(found)


def test_the_two_texts_of_dprec_share_their_runs_only_where_no_setting_differs():
    own = {c.key: c for c in paper_tables.cells("dprec")}
    same = [c for c in own.values() if c.same_as]
    scores = [key for key in own if key.endswith(".fedavg.acc")]
    assert [c.key for c in same] == [key for key in scores if key.startswith("iclr.")]
    for c in same:
        other = own[c.same_as]
        assert c.same_as == c.key.removeprefix("iclr.")
        assert not other.same_as and other.unit == c.unit
    apart = {h.name for h in paper_tables.paper("dprec").hypers if h.version != "both"}
    assert all(name.startswith("rec.") or name.endswith("n_runs") for name in apart)
