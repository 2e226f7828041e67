"""What a committed run claims is what was run: every guarantee is made again and laid
beside the configuration.
"""

import functools
import re
from dataclasses import fields

from tables import tabled

from dpcomm.evidence import paper_tables, records
from dpcomm.privacy.guarantee import recorded


@functools.cache
def committed() -> list:
    "(name, record) of every committed run with a guarantee."
    return [
        (f"{r.experiment}.{r.scale}:{r.key}.seed{r.seed}", r)
        for paper in paper_tables.papers()
        for r in records.load(paper)
        if r.guarantee
    ]


def fixed() -> list:
    "Those whose cohort was fixed and whose guarantee is about Poisson sampling."
    return [
        (name, run)
        for name, run in committed()
        if run.config.get("sampling", "fixed") == "fixed"
        and run.guarantee["sampling"] == "poisson"
    ]


@tabled("name, run", committed)
def test_a_committed_guarantee_is_about_its_run(name, run):
    from dpcomm.training.federated import Config, check_promise

    known = {field.name for field in fields(Config)} - {"engine"}  # may be retired
    promise = recorded(run.guarantee)
    assert promise.rounds is not None
    if "sampling" not in run.config:
        return
    config = Config(**{k: v for k, v in run.config.items() if k in known})
    most = re.search(r"for the client drawn most often, in (\d+) rounds", promise.note)
    unit = "example" if run.experiment == "imvu_femnist" else "client"
    rounds = int(most.group(1)) if most else None
    n_clients = round(config.cohort / promise.q) if promise.q else 10**9
    check_promise(promise, config, n_clients, rounds, unit=unit)
    if promise.scope == "per-round":  # the whole run's stands beside it
        assert recorded(run.as_run[promise.relation]).scope == "total"


@tabled("name, run", fixed)
def test_a_fixed_cohort_accounted_as_poisson_says_so_first_and_what_it_costs(name, run):
    promise, config = recorded(run.guarantee), run.config
    assert str(promise).startswith(
        "As the paper accounts it, by Poisson sampling, while the run draws cohorts of"
        " a fixed size"
    )
    assert "accounted as" not in promise.note and promise.trust == "central"
    shares = str(config.get("mechanism")).startswith("DDGauss")
    assert set(run.as_run) == (
        {"zero-out", "replace"} if shares else {"add-remove", "replace"}
    )
    for relation, told in run.as_run.items():
        told = recorded(told)
        assert (told.relation, told.rounds) == (relation, config["rounds"])
        assert told.eps > promise.eps and not told.premises
        where = ("none", "secagg") if shares else ("fixed", "central")
        assert (told.sampling, told.trust) == where


def test_there_are_runs_of_either_kind():
    assert len(fixed()) >= 40 and len(committed()) > 200
