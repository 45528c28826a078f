"""The modules by which a training script calls the parameters, found at their first call with gradients.

An optimizer gets parameters only. Two things are about the modules: how many samples pass through them, and that
DistributedDataParallel must not average gradients before the vote. A hook of torch that sees every call looks for the
outermost modules that hold the parameters. It is removed at the first step.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from signvote.core.samples import SampleCount
from signvote.engines.ddp.torch_names import GradBucket
from signvote.errors import ConfigError


class Callers:
    """Finds the outermost modules that are called with some parameters.

    Args:
        parameters: that are voted on.

    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.silenced: list[DistributedDataParallel] = []
        self._voted = {id(parameter) for parameter in parameters}
        self._inside: set[int] = set()  # the modules in those that were found
        self._samples: SampleCount | None = None
        self._stop = _call_before_modules(self)

    def take_samples(self) -> int:
        """The samples that passed through the first module found, since this was last called; 0: unknown."""
        if self._samples is None:
            return 0
        count = self._samples.total
        self._samples.total = 0
        return count

    def stop_looking(self) -> None:
        """Remove the hook: all modules have been called."""
        self._stop()

    def look(self, module: nn.Module) -> None:
        """Look at a module that is about to be called."""
        if id(module) in self._inside or not torch.is_grad_enabled():
            return
        if not any(id(parameter) in self._voted for parameter in module.parameters()):
            return
        inside = list(module.modules())
        self._inside |= {id(each) for each in inside}
        for each in inside:
            if isinstance(each, DistributedDataParallel):
                silence(each, self._voted)
                self.silenced.append(each)
        if self._samples is None:
            self._samples = SampleCount(module)


def _call_before_modules(callers: Callers) -> Any:
    """Have torch call `look` before every call of a module, until the result is called or `callers` is gone."""
    alive = weakref.ref(callers)

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        found = alive()
        if found is not None:
            found.look(module)

    handle = register_module_forward_pre_hook(before)
    return weakref.finalize(callers, handle.remove)


# ---- DDP ---------------------------------------------------------------------------------------------

_VOTED = WeakIdKeyDictionary()  # DDP -> the ids of the parameters whose gradients it does not average


def silence(ddp: DistributedDataParallel, voted: set[int]) -> None:
    """Have DDP average the gradients of other parameters only.

    Args:
        ddp: before its first backward pass, or between two.
        voted: the ids of the parameters that are voted on.

    """
    if ddp in _VOTED:
        _VOTED[ddp] |= voted
        return
    silent = set(voted)
    try:
        ddp.register_comm_hook((ddp.process_group, silent), average_others)
    except RuntimeError as error:
        raise ConfigError(
            "this DistributedDataParallel has a communication hook; Vote needs one without: it votes in step()"
        ) from error
    _VOTED[ddp] = silent


def average_others(
    state: tuple[dist.ProcessGroup, set[int]], bucket: GradBucket
) -> torch.futures.Future[Tensor]:
    """DDP's hook beside `Vote`: leaves gradients that are voted on, and averages the others as DDP does."""
    group, voted = state
    pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
    others = [gradient for parameter, gradient in pairs if id(parameter) not in voted]
    if others:
        flat = torch.cat([gradient.reshape(-1) for gradient in others])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        lengths = [gradient.numel() for gradient in others]
        for gradient, mean in zip(others, torch.split(flat, lengths), strict=True):
            gradient.copy_(mean.view_as(gradient))
    buffer = bucket.buffer()
    future: torch.futures.Future[Tensor] = torch.futures.Future(
        devices=[buffer.device] if buffer.is_cuda else None
    )
    future.set_result(buffer)
    return future
