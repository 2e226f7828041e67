"Who takes part, and what protects them."

from functools import cache

from dpcomm import Deployment

from .task import model


@cache
def _protection(clients, cohort, mechanism, eps, clip, **run):
    sampling = "fixed" if cohort < clients else "none"
    d = sum(p.numel() for p in model().parameters())
    where = Deployment(n_clients=clients, cohort=cohort, sampling=sampling, d=d, **run)
    return where, where.calibrate(mechanism, eps=eps, clip_norm=clip)


def protection(config):
    "The deployment, and the mechanism with least noise that keeps its epsilon."
    names = "clients cohort rounds eps delta mechanism clip trust tolerance".split()
    return _protection(**{name: config[name] for name in names})
