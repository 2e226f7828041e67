"What server and clients agree on."

from dpcomm import Deployment, mechanism
from dpcomm.commands import assignments
from dpcomm.core.random import seed_tree
from dpcomm.training import federated, models


def situation(config):
    "Who takes part, how often, and who is trusted: here everybody, in every round."
    names = "rounds", "delta", "trust", "tolerance"
    said = {name: config[name] for name in names}
    n = config["clients"]
    return Deployment(n_clients=n, cohort=n, sampling="none", **said)


def plan(config, federation):
    "The task, as one machine knows it: without data, or with its own."
    model = models.build(config["model"], seed_tree(config["seed"], "init"))
    made = mechanism(config["mechanism"], **assignments(config["parameters"].split()))
    settings = federated.Config(lr=0.1, server="sgd", server_lr=0.3, engine="loop")
    return federated.Task(model, federation, made, settings, config["seed"])
