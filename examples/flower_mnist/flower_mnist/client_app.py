"""A node: its own data, the loss on it, a vote."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor

from flower_mnist.task import batch, batch_size, make_task
from signvote.engines.flower import vote

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """One round: `vote` brings the model up to date, computes and answers."""
    task = make_task()
    model = task.model()
    partition = int(context.node_config["partition-id"])
    partitions = int(context.node_config["num-partitions"])

    def loss(step: int) -> Tensor:
        inputs, labels = batch(task, partition, partitions)
        return task.loss(model(inputs), labels)

    return vote(message, context, model, loss, batch_size=batch_size(partition))
