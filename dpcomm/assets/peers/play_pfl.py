"A round by pfl: a model, a federation, a simulated backend and an algorithm."

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data import FederatedDataset
from pfl.data.dataset import Dataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

from dpcomm.assets.peers.turns import Turns

turns = Turns()
x, y, plan = turns.x, turns.y, turns.plan


class Classifier(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def loss(self, images, labels, eval=False):
        return torch.nn.functional.cross_entropy(self.layers(images), labels)

    def metrics(self, images, labels, eval=True):
        return {}


class Passing(TrainingProcessCallback):
    "Hands the turn back after each iteration."

    def after_central_iteration(self, metrics, model, *, central_iteration):
        turns.done(model.pytorch_model.parameters())
        if central_iteration + 1 < turns.rounds:
            turns.wait()
        return False, Metrics()


users = [Dataset((x[client.flatten()], y[client.flatten()])) for client in plan]
sampler = get_user_sampler("minimize_reuse", list(range(len(users))))
federation = FederatedDataset(users.__getitem__, sampler)
net = Classifier(turns.model)
turns.wait()
FederatedAveraging().run(
    NNAlgorithmParams(turns.rounds, 10**9, len(users), None),
    SimulatedBackend(federation, federation),
    PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0)),
    NNTrainHyperParams(plan.shape[2], 1, turns.lr),
    callbacks=[Passing()],
)
