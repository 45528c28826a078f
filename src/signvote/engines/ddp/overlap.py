"""Gradients leave while the backward pass computes the others: one backward pass a step, nothing changed after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from signvote.engines.ddp.torch_names import local_of
from signvote.errors import EngineError


class Witness(NamedTuple):
    """A gradient as it was sent."""

    parameter: Tensor
    gradient: Tensor
    version: int  # of the gradient: how often it was written to
    sent: Tensor  # a copy


class Overlap:
    """Calls a function with each parameter whose gradient is complete.

    Args:
        parameters: that are voted on.
        ready: what to do with one whose gradient is complete.

    """

    def __init__(self, parameters: Sequence[Tensor], ready: Callable[[Tensor], None]) -> None:
        self.is_paused = False  # this backward pass is not the last of the step
        self._ready = ready
        self._sent: set[int] = set()  # ids of parameters, in this round
        self._is_sent_twice = False
        self._witness: Witness | None = None
        self._smallest = min(parameters, key=Tensor.numel)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]

    def _accumulated(self, parameter: Tensor) -> None:
        if self.is_paused:
            return
        if id(parameter) in self._sent:
            self._is_sent_twice = True
            return
        self._sent.add(id(parameter))
        if parameter is self._smallest and parameter.grad is not None:
            gradient = parameter.grad
            self._witness = Witness(parameter, gradient, gradient._version, local_of(gradient).clone())
        self._ready(parameter)

    def check(self, *, is_alone: bool) -> None:
        """Raise if a gradient is not what was sent; then wait for the next round.

        Args:
            is_alone: nothing was sent. An error is only a word of warning, and need not wait for the GPU.

        """
        is_sent_twice = self._is_sent_twice
        is_changed = not (is_alone and self._is_untouched()) and self._is_changed()
        self.begin()
        if is_sent_twice:
            raise EngineError(
                "a second backward pass added to gradients that were sent; run all passes of a step but the last in"
                " `with optimizer.no_sync():`, or use Vote(overlap=False)"
            )
        if is_changed:
            raise EngineError(
                "gradients were changed after they were sent, as by clip_grad_norm_; use Vote(overlap=False), which"
                " sends them in step()"
            )

    def begin(self) -> None:
        """Wait for the gradients of a new round."""
        self._sent = set()
        self._is_sent_twice = False
        self._witness = None

    def _is_untouched(self) -> bool:
        """Whether nobody has written to the smallest tensor's gradient since it was computed."""
        if self._witness is None:
            return True
        parameter, gradient, version, _ = self._witness
        return parameter.grad is gradient and gradient._version == version

    def _is_changed(self) -> bool:
        """Whether the smallest tensor's gradient is not the one that was sent."""
        if self._witness is None:
            return False
        parameter, _, _, sent = self._witness
        now = parameter.grad
        return now is None or not torch.equal(local_of(now).nan_to_num(), sent.nan_to_num())
