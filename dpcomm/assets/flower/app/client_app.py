"The client: trains as ever; the mod sends the mechanism's message."

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from dpcomm.interop.flower import mod

from .private import protection
from .task import data, model, train

# A node answers within the floor that its owner names in --node-config, and not without
# one. For a rehearsal, in Flower's simulation for example, add floor=False here.
made = mod(lambda context: protection(context.run_config)[1], model=model())
app = ClientApp(mods=[made])


@app.train()
def fit(message, context):
    own = model()
    own.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = data(context.node_config["partition-id"], context.run_config["clients"])
    train(own, x, y)
    content = {"arrays": ArrayRecord(own.state_dict())}
    content["metrics"] = MetricRecord({"num-examples": len(y)})
    return Message(RecordDict(content), reply_to=message)
