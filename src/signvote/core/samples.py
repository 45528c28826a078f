"""How many samples a gradient comes from: counted as batches pass through the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class SampleCount:
    """Counts the samples that pass through a module: the first dimension of the first tensor that it is called with.

    Several passes add up, as with gradient accumulation. A pass in evaluation mode or without gradients does not
    count, nor does one without a tensor.

    Args:
        module: the module that is called; a hook stays in it until `close`.

    >>> model = nn.Linear(2, 1)
    >>> samples = SampleCount(model)
    >>> for batch in torch.zeros(8, 2), torch.zeros(3, 2):
    ...     loss = model(batch).sum()
    >>> samples.take()
    11

    """

    def __init__(self, module: nn.Module) -> None:
        self.total = 0  # since `take`
        # A method, not a function: a deep copy of the module then has a count of its own.
        self._hook = module.register_forward_hook(self._count, with_kwargs=True)

    def _count(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: object,
    ) -> None:
        if module.training and torch.is_grad_enabled():
            self.total += first_dimension((args, kwargs)) or 0

    def take(self) -> int:
        """The samples since this was last called."""
        total = self.total
        self.total = 0
        return total

    def close(self) -> None:
        """Stop counting."""
        self._hook.remove()


def first_dimension(arguments: object) -> int | None:
    """The first dimension of the first tensor in nested tuples, lists and mappings; None if there is none.

    >>> first_dimension(["text", {"scale": torch.tensor(2.0), "images": torch.zeros(8, 3)}])
    8
    """
    if isinstance(arguments, Tensor):
        return arguments.size(0) if arguments.dim() else None
    if isinstance(arguments, Mapping):
        arguments = list(arguments.values())
    if isinstance(arguments, list | tuple):
        for each in arguments:
            found = first_dimension(each)
            if found is not None:
                return found
    return None
