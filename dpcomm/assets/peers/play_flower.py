"A round by Flower: an app for the client, one for the server, and a simulation with Ray."

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from dpcomm.assets.peers.turns import Turns

turns = Turns()
x, y, plan, model = turns.x, turns.y, turns.plan, turns.model
client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message, context):
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=turns.lr)
    loss_of = torch.nn.CrossEntropyLoss()
    for batch in plan[context.node_config["partition-id"]]:
        optimizer.zero_grad()
        loss_of(model(x[batch]), y[batch]).backward()
        optimizer.step()
    arrays = ArrayRecord(model.state_dict())
    metrics = MetricRecord({"num-examples": plan[0].numel()})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def take_turns(server_round, arrays):
    if server_round:
        turns.done(arrays.to_torch_state_dict().values())
    if server_round < turns.rounds:
        turns.wait()


@server_app.main()
def main(grid, context):
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=len(plan))
    arrays = ArrayRecord(model.state_dict())
    strategy.start(grid, arrays, turns.rounds, evaluate_fn=take_turns)


if __name__ == "__main__":  # Ray's actors import the client's app from this file
    from dpcomm.assets.peers import play_flower

    resources = {"num_cpus": 1, "num_gpus": 0.0}
    ray = {"num_cpus": turns.threads, "_node_ip_address": "127.0.0.1"}
    run_simulation(
        server_app,
        play_flower.client_app,
        len(plan),
        backend_config={"client_resources": resources, "init_args": ray},
    )
