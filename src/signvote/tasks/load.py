"""The tasks by name.

name            images                                  model       prepared
mnist-10k       MNIST's t10k, 8,000/2,000, bundled      mnist-cnn   normalized
mnist           60,000/10,000                           mnist-cnn   normalized
fashion-mnist   60,000/10,000                           mnist-cnn   normalized, with MNIST's numbers
cifar10         50,000/10,000                           resnet20    normalized, with ImageNet's; crop and flip
python-source   text: Python's standard library         gpt-tiny    bytes
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from signvote.errors import ConfigError
from signvote.names import check_name
from signvote.recipes import usual_recipe
from signvote.tasks.augment import Augment, crop_and_flip
from signvote.tasks.data import Data
from signvote.tasks.files import data_folder, read_bundled, read_cifar10, read_mnist
from signvote.tasks.models import CIFAR_SHAPE, MNIST_SHAPE, SAMPLES_PER_PASS, Shape, model_for
from signvote.tasks.own import made
from signvote.tasks.task import Task
from signvote.tasks.text import TEXT, text_task


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """A named task before its data are read. The defaults are MNIST's."""

    read: Callable[[Path], tuple[Data, Data]]  # data folder -> training and test data
    shape: Shape = MNIST_SHAPE
    model: str = "mnist-cnn"
    mean: tuple[float, ...] = (0.1307,)
    deviation: tuple[float, ...] = (0.3081,)
    augment: Augment | None = None


SPECS = {
    "mnist-10k": TaskSpec(read=lambda _: read_bundled()),
    "mnist": TaskSpec(read=partial(read_mnist, task="mnist")),
    "fashion-mnist": TaskSpec(read=partial(read_mnist, task="fashion-mnist")),
    "cifar10": TaskSpec(
        read=read_cifar10,
        shape=CIFAR_SHAPE,
        model="resnet20",
        mean=(0.485, 0.456, 0.406),
        deviation=(0.229, 0.224, 0.225),
        augment=crop_and_flip,
    ),
}
TASKS = (*SPECS, TEXT)
OWN = "MODULE:FACTORY"


def load_task(
    name: str,
    data_dir: Path | str | None = None,
    model: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Task:
    """Read the data of a named task, or make a task of your own.

    Args:
        name: one of TASKS, or MODULE:FACTORY: a function that returns a task.
        data_dir: folder with the official files. Default: SIGNVOTE_DATA, or else ~/.cache/signvote.
        model: one of MODELS that accepts the task's images or text. Default: the task's own.
        options: arguments of FACTORY.

    """
    if ":" in name:
        if model is not None:
            raise ConfigError(
                f"model is {model!r}; task {name!r} brings its own: choose it by an argument of its function"
            )
        return made(name, options or {})
    check_name("task", name, (*TASKS, OWN))
    if options:
        raise ConfigError(f"task {name!r} takes no options; only a task given as {OWN} does")
    if name == TEXT:
        return text_task(model or "gpt-tiny")
    spec = SPECS[name]
    model = model or spec.model
    make_model = model_for(model, spec.shape)
    train, test = spec.read(data_folder(data_dir))
    return Task(
        name=name,
        train=train,
        test=test,
        model=make_model,
        mean=spec.mean,
        deviation=spec.deviation,
        augment=spec.augment,
        samples_per_pass=SAMPLES_PER_PASS.get(model),
    )


def recipe_for(name: str, options: Mapping[str, Any]) -> str:
    """The recipe of a run that names none: that of its task. A task of your own is made once to learn it."""
    if ":" in name:
        return _recipe_of_own(name, json.dumps(options, sort_keys=True))
    return usual_recipe(name)


@lru_cache
def _recipe_of_own(name: str, options: str) -> str:
    return made(name, json.loads(options)).recipe
