"""The modules around the parameters: an optimizer gets parameters only, and three things are about modules.

    how many samples a gradient comes from    counted as batches pass through the modules
    DistributedDataParallel                   must not average gradients before the vote
    the first forward pass after a vote       starts from the rank's own parameters: see LocalVote

The modules are found among all objects that Python tracks. A wrapper may be made after the optimizer, so the search is
repeated at the first gradient, before DDP can send one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from signvote.core.samples import SampleCount
from signvote.engines.ddp.silence import silence
from signvote.engines.ddp.torch_names import sharding_of
from signvote.errors import ConfigError


class Holder(NamedTuple):
    """A module, and how many of some parameters are in it."""

    module: nn.Module
    held: int


def holders_of(parameters: Iterable[Tensor]) -> list[Holder]:
    """All modules that hold some of these parameters, the outermost first."""
    wanted = {id(parameter) for parameter in parameters}
    holders = []
    for module in _all_modules():
        held = sum(id(parameter) in wanted for parameter in module.parameters())
        if held:
            holders.append(Holder(module, held))
    return sorted(holders, key=_reach, reverse=True)


def _all_modules() -> list[nn.Module]:
    """The modules that Python knows, but those that are being made."""
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    return [module for module in modules if "_modules" in vars(module)]


def _reach(holder: Holder) -> tuple[int, int]:
    """A module reaches further than those inside it."""
    return holder.held, len(list(holder.module.modules()))


class BeforePass:
    """Calls a method before each forward pass in training that is to have gradients.

    It does not keep the method's object alive, and a copy of the module calls nothing.

    Args:
        module: that is called.
        method: of an object, without arguments.

    """

    def __init__(self, module: nn.Module | None = None, method: Callable[[], None] | None = None) -> None:
        self._method = None if method is None else WeakMethod(method)
        if module is not None:
            module.register_forward_pre_hook(self._on_pass)

    def _on_pass(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        method = None if self._method is None else self._method()
        is_training = module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if method is not None and is_training:
            method()

    def __reduce__(self) -> tuple[type[BeforePass], tuple[()]]:
        return BeforePass, ()


class Surroundings:
    """The modules that hold some parameters. Samples are counted in them, and DDP is kept from averaging.

    A script calls the model, a wrapper around it, or its layers one by one. So samples are counted in every module that
    holds all of the parameters, and in the parts of the innermost. The outermost that was called counts.

    Args:
        parameters: that are voted on.
        before_pass: a method to call before a forward pass in training; None: nothing.

    """

    def __init__(self, parameters: Sequence[Tensor], before_pass: Callable[[], None] | None = None) -> None:
        self._before_pass = before_pass
        self.silenced: list[DistributedDataParallel] = []
        self._parameters = parameters
        self.modules: list[nn.Module] = []  # that hold some of the parameters
        self._counts: dict[nn.Module, SampleCount] = {}  # the outermost first
        self._hooks: list[RemovableHandle] = []
        self._look()
        for parameter in parameters:
            if parameter.requires_grad:
                self._hooks.append(parameter.register_hook(self._on_gradient))  # type: ignore[no-untyped-call]

    def _on_gradient(self, gradient: Tensor) -> None:
        """Look again at the first gradient of all: no bucket of DDP is complete yet."""
        if self._hooks:
            self.stop_looking()
            self._look()

    def stop_looking(self) -> None:
        """Remove the hooks that wait for the first gradient."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _look(self) -> None:
        holders = holders_of(self._parameters)
        self.modules = [holder.module for holder in holders]
        whole = [holder.module for holder in holders if holder.held == len(self._parameters)]
        parts = list(whole[-1].children()) if whole else [holder.module for holder in holders]
        modules = (*whole, *parts)
        if self._before_pass is not None:
            for module in modules:
                if module not in self._counts:
                    BeforePass(module, self._before_pass)
        self._counts = {module: self._counts.get(module) or self._new_count(module) for module in modules}
        voted = {id(parameter) for parameter in self._parameters}
        for holder in holders:
            if isinstance(holder.module, DistributedDataParallel) and holder.module not in self.silenced:
                silence(holder.module, voted)
                self.silenced.append(holder.module)

    def check_replaced(self) -> None:
        """Raise if `fully_shard` has replaced the parameters: those of the optimizer would never get a gradient."""
        current = [parameter for module in self.modules for parameter in module.parameters()]
        held = {id(parameter) for parameter in current}
        if any(id(parameter) in held for parameter in self._parameters):
            return
        was_sharded = any(sharding_of(parameter) is not None for parameter in self._parameters)
        if not was_sharded and any(sharding_of(parameter) is not None for parameter in current):
            raise ConfigError("fully_shard has replaced the model's parameters; make Vote after fully_shard")

    def _new_count(self, module: nn.Module) -> SampleCount:
        """A count that begins with what others have counted: the module may have been found between two batches."""
        count = SampleCount(module)
        count.total = self._samples()
        return count

    def _samples(self) -> int:
        totals = [count.total for count in self._counts.values()]
        return next((total for total in totals if total), 0)

    def take_samples(self) -> int:
        """The samples since this was last called; 0: unknown."""
        samples = self._samples()
        for count in self._counts.values():
            count.take()
        return samples
