"The server: deadlines, and a score after every round."

from dpcomm.datasets import images
from dpcomm.flower import RemoteFederation
from dpcomm.flower.server import server_app
from dpcomm.flower.sums import read_keys
from dpcomm.flower.transport import Deadlines
from dpcomm.training import federated

from .plan import plan, situation


def serve(config):
    "Arguments of `serve`."
    identity = sums = None
    if config["keys"]:
        identity, sums = read_keys(config["keys"], "server")
    summed = sums if config["sums"] else None
    apart, wait = RemoteFederation(config["clients"], sums=summed), config["seconds"]
    task, test = plan(config, apart), images.load("digits")

    def score(w):
        right, _ = federated.evaluate(task.model, w, test.x_test, test.y_test)
        return f"accuracy {right:.1f} %"

    waits = Deadlines(wait, wait, wait, least=config["least"])
    said = dict(deployment=situation(config), deadlines=waits, score=score)
    history = config["model"] if config["history"] else None
    said |= dict(directory=sums and sums.directory, history=history)
    return dict(task=task, identity=identity) | said


app = server_app(serve)
