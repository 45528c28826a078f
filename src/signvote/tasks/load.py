"""The tasks by name.

name            images                                  model       prepared
mnist-10k       MNIST's t10k, 8,000/2,000, bundled      mnist-cnn   normalised
mnist           60,000/10,000                           mnist-cnn   normalised
fashion-mnist   60,000/10,000                           mnist-cnn   normalised, by MNIST's numbers
cifar10         50,000/10,000                           resnet20    normalised, by ImageNet's; crop and flip
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from signvote.names import check_name
from signvote.tasks.augment import Augment, crop_and_flip
from signvote.tasks.files import data_folder, read_bundled, read_cifar10, read_mnist
from signvote.tasks.models import CHUNKS, CIFAR_SHAPE, MNIST_SHAPE, Shape, model_for
from signvote.tasks.task import Data, Task


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a task's name stands for; the defaults are MNIST's."""

    read: Callable[[Path], tuple[Data, Data]]  # from a data folder
    shape: Shape = MNIST_SHAPE
    model: str = "mnist-cnn"
    mean: tuple[float, ...] = (0.1307,)
    deviation: tuple[float, ...] = (0.3081,)
    augment: Augment | None = None


RECIPES = {
    "mnist-10k": Recipe(read=lambda _: read_bundled()),
    "mnist": Recipe(read=partial(read_mnist, task="mnist")),
    "fashion-mnist": Recipe(read=partial(read_mnist, task="fashion-mnist")),
    "cifar10": Recipe(
        read=read_cifar10,
        shape=CIFAR_SHAPE,
        model="resnet20",
        mean=(0.485, 0.456, 0.406),
        deviation=(0.229, 0.224, 0.225),
        augment=crop_and_flip,
    ),
}
TASKS = tuple(RECIPES)


def load_task(name: str, data_dir: Path | None = None, model: str | None = None) -> Task:
    """A task by name, with its data read.

    Args:
        name: one of TASKS.
        data_dir: folder with the official files; None: SIGNVOTE_DATA, or else ~/.cache/signvote.
        model: one of MODELS that takes the task's images; None: the task's own.

    """
    check_name("task", name, TASKS)
    recipe = RECIPES[name]
    model = model or recipe.model
    fresh = model_for(model, recipe.shape)
    train, test = recipe.read(data_folder(data_dir))
    return Task(
        name=name,
        train=train,
        test=test,
        model=fresh,
        mean=recipe.mean,
        deviation=recipe.deviation,
        augment=recipe.augment,
        chunk=CHUNKS.get(model),
    )
