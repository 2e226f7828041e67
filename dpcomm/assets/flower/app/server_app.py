"The server: any strategy that averages, inside Private."

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import ServerApp
from flwr.serverapp import strategy as strategies

from dpcomm.interop.flower import Private

from .private import protection
from .task import accuracy, model

HOW = {"FedAdam": dict(eta=0.02), "FedAvgM": dict(server_momentum=0.5)}
app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    where, mechanism = protection(config)
    name = config["strategy"]
    asked = dict(min_available_nodes=config["cohort"], fraction_evaluate=0.0)
    inner = getattr(strategies, name)(**asked, **HOW.get(name, {}))
    keys = config["keys"] or None
    strategy = Private(inner, mechanism, where, keys=keys, model=model())

    def score(server_round, arrays):
        now = model()
        now.load_state_dict(arrays.to_torch_state_dict())
        right = accuracy(now)
        print(f"round {server_round}: accuracy {right:.1%}", flush=True)
        return MetricRecord({"accuracy": right})

    first, rounds = ArrayRecord(model().state_dict()), config["rounds"]
    strategy.start(grid, first, num_rounds=rounds, evaluate_fn=score)
    print(strategy.spent, flush=True)
