"""What a training script calls. No postponed annotations here: DDP compares a hook's annotations themselves."""

import time
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from signvote.engines.ddp.state import VoteState, unset


def vote_hook(state: VoteState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """One bit per parameter each way: `ddp.register_comm_hook(state, vote_hook)`, then SGD(lr=step)."""
    return state.take(bucket)


def noop_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Sends nothing, and trains every rank by itself: how fast training could be, for measuring only."""
    future = unset(bucket.buffer())
    future.set_result(bucket.buffer())
    return future


def vote_gradients(state: VoteState) -> None:
    """The same vote without DDP: after `backward()`, turns every `.grad` into the decision; then SGD(lr=step)."""
    entered = time.perf_counter()
    parameters = list(state.parameters.values())
    state.put(parameters, [p.grad for p in parameters])
    decision = state.decide(entered)
    for p in parameters:
        if p.grad is None:
            p.grad = torch.empty_like(p)
    state.fill(parameters, [p.grad for p in parameters if p.grad is not None], decision)
