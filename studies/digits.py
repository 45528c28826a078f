"""MNIST with the accuracy of its worst class as the first metric: a task for `--task studies.digits:worst`."""

from __future__ import annotations

from dataclasses import replace

from signvote.tasks import Task, accuracy, load_task, loss, worst_class


def worst() -> Task:
    """The perceptron on MNIST; figures and tables show the worst class."""
    return replace(load_task("mnist", model="mlp"), metrics=(worst_class(10), accuracy(), loss()))
