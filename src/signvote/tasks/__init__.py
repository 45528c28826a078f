"""Data sets and models of the experiments: Task holds one of each, load_task makes them by name."""

from signvote.tasks.load import TASKS, load_task
from signvote.tasks.models import MODELS
from signvote.tasks.task import Data, Task

__all__ = ["MODELS", "TASKS", "Data", "Task", "load_task"]
