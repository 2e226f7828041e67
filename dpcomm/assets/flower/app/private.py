"Who takes part, and what protects them."

from functools import cache

from dpcomm import Deployment

from .task import model


@cache
def _protection(clients, cohort, rounds, eps, delta, mechanism, clip, trust, tolerance):
    where = Deployment(
        n_clients=clients,
        cohort=cohort,
        rounds=rounds,
        delta=delta,
        trust=trust,
        sampling="fixed" if cohort < clients else "none",
        tolerance=tolerance,
        d=sum(p.numel() for p in model().parameters()),
    )
    return where, where.calibrate(mechanism, eps=eps, clip_norm=clip)


def protection(config):
    "The deployment, and the mechanism with least noise that keeps its epsilon."
    names = "clients cohort rounds eps delta mechanism clip trust tolerance".split()
    return _protection(*(config[name] for name in names))
