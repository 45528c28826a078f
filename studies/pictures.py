"""CIFAR-10 at 16 x 16 pixels, for a CPU: `--task studies.pictures:halved --task-options model=resnet20-gn`."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.nn.functional import avg_pool2d

from signvote.tasks import Data, Task, load_task


def halved(model: str = "resnet20-gn") -> Task:
    """CIFAR-10 with the mean of 2 x 2 pixels as one; no crops and flips.

    Args:
        model: one for CIFAR-10, which accepts images of any size.

    """
    task = load_task("cifar10", model=model)
    return replace(task, name="cifar10-halved", train=_half(task.train), test=_half(task.test), augment=None)


def _half(data: Data) -> Data:
    return replace(data, inputs=pooled(data.inputs))


def pooled(images: Tensor) -> Tensor:
    """uint8 images of half the size.

    >>> import torch
    >>> pooled(torch.tensor([[[[1, 2], [3, 6]]]], dtype=torch.uint8)).tolist()
    [[[[3]]]]
    """
    means = avg_pool2d(images.float(), 2)
    return means.round().to(images.dtype)
