"A round as a loop over clients in plain PyTorch."

import copy

import torch

from dpcomm.assets.peers.turns import Turns

turns = Turns()
x, y, plan, model = turns.x, turns.y, turns.plan, turns.model
loss_of = torch.nn.CrossEntropyLoss()


def train(client):
    local = copy.deepcopy(model)
    optimizer = torch.optim.SGD(local.parameters(), lr=turns.lr)
    for batch in client:
        optimizer.zero_grad()
        loss_of(local(x[batch]), y[batch]).backward()
        optimizer.step()
    return local.state_dict()


for _ in range(turns.rounds):
    turns.wait()
    states = [train(client) for client in plan]
    mean = {k: torch.stack([s[k] for s in states]).mean(0) for k in states[0]}
    model.load_state_dict(mean)
    turns.done(model.parameters())
