"Your part: a model, its data and its training."

from functools import cache

import torch

from dpcomm.core.random import seed_tree
from dpcomm.datasets import images

digits = cache(lambda: images.load("digits"))


def model():
    torch.manual_seed(0)
    return torch.nn.Linear(784, 10)


def data(client, clients):
    "Images and digits of one of the clients."
    all_of_them = digits()
    parts = images.iid(len(all_of_them.y), clients, seed_tree(0, "parts"))
    mine = torch.as_tensor(parts[client])
    return all_of_them.x[mine].flatten(1), all_of_them.y[mine]


def train(model, x, y, steps=3, lr=0.1):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def accuracy(model):
    test = digits()
    right = model(test.x_test.flatten(1)).argmax(1) == test.y_test
    return right.double().mean().item()
