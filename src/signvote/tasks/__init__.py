"""Data, models, losses and metrics of the experiments: Task holds one of each, load_task makes them by name."""

from signvote.tasks.data import Batch, Data, Items, Samples
from signvote.tasks.load import TASKS, load_task
from signvote.tasks.losses import Loss, OutputLoss, cross_entropy, squared_error, token_cross_entropy
from signvote.tasks.metrics import Measure, accuracy, loss, mae, perplexity, rmse, worst_class
from signvote.tasks.models import MODELS
from signvote.tasks.task import Task

__all__ = [
    "MODELS",
    "TASKS",
    "Batch",
    "Data",
    "Items",
    "Loss",
    "Measure",
    "OutputLoss",
    "Samples",
    "Task",
    "accuracy",
    "cross_entropy",
    "load_task",
    "loss",
    "mae",
    "perplexity",
    "rmse",
    "squared_error",
    "token_cross_entropy",
    "worst_class",
]
