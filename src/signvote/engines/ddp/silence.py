"""DistributedDataParallel next to `Vote`: it must not average gradients before they are voted on.

No postponed annotations here: DDP compares a hook's annotations themselves.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from signvote.engines.ddp.torch_names import GradBucket
from signvote.errors import ConfigError

_VOTED = WeakIdKeyDictionary()  # DDP -> the ids of the parameters whose gradients it does not average


def silence(ddp: DistributedDataParallel, voted: Iterable[int]) -> None:
    """Have DDP average the gradients of other parameters only.

    Args:
        ddp: before its first backward pass, or between two.
        voted: the ids of the parameters that are voted on.

    """
    if ddp in _VOTED:
        _VOTED[ddp] |= set(voted)
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
