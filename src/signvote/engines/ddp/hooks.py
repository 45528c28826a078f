"""What a training script calls. No postponed annotations here: DDP compares a hook's annotations themselves."""

import time
from typing import Any

import torch
from torch import Tensor

from signvote.engines.ddp.gradients import Bucket
from signvote.engines.ddp.state import VoteState
from signvote.engines.ddp.torch_names import GradBucket, after_backward


def vote_hook(state: VoteState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """One bit per parameter each way: `ddp.register_comm_hook(state, vote_hook)`, then SGD(lr=step).

    Each bucket's gradients are taken in. With the last bucket the vote is held and all buckets are filled. If too few
    ranks voted, every `.grad` is None after `backward()`, so that nothing moves.
    """
    if bucket.is_last() and state.balancer is not None and bucket.buffer().is_cuda:
        torch.cuda.current_stream().synchronize()  # or the time until here would be the host's
    entered = time.perf_counter()
    pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
    views = [_like(parameter, gradient) for parameter, gradient in pairs]
    mine = Bucket(bucket.buffer(), bucket.parameters(), views, _future(bucket.buffer()))
    state.buckets.append(mine)
    try:
        state.put(mine.parameters, views)
        if bucket.is_last():
            _decide(state, entered)
        else:
            state.stopwatch.spend(entered)
    finally:
        if bucket.is_last():
            state.buckets = []
    return mine.future


def _decide(state: VoteState, entered: float) -> None:
    """Hold the vote, and give DDP every bucket with the decision in it."""
    decision = state.decide(entered)
    for bucket in state.buckets:
        state.fill(bucket.parameters, bucket.views, decision)
        bucket.future.set_result(bucket.buffer)
    if _leaves_nothing(state):
        after_backward(lambda: _clear(state))


def _leaves_nothing(state: VoteState) -> bool:
    """Whether gradients must become None. AMP does not allow that: its scaler skips the step by infinities."""
    return state.scaler is None and not state.report.is_decided


def _clear(state: VoteState) -> None:
    """Leave no gradients. An optimizer skips such parameters, and takes no step of weight decay either."""
    for parameter in state.poll.parameters.values():
        parameter.grad = None


def noop_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Sends nothing, and trains every rank by itself: how fast training could be, for measuring only."""
    future = _future(bucket.buffer())
    future.set_result(bucket.buffer())
    return future


def vote_gradients(state: VoteState) -> None:
    """The same vote without DDP: after `backward()`, turns every `.grad` into the decision; then SGD(lr=step).

    If too few ranks voted, every `.grad` becomes None, so that nothing moves.
    """
    entered = time.perf_counter()
    parameters = list(state.poll.parameters.values())
    state.put(parameters, [p.grad for p in parameters])
    decision = state.decide(entered)
    for p in parameters:
        if p.grad is None:
            p.grad = torch.empty_like(p)
    state.fill(parameters, [p.grad for p in parameters if p.grad is not None], decision)
    if _leaves_nothing(state):
        _clear(state)


def _like(parameter: Tensor, gradient: Tensor) -> Tensor:
    """A bucket's slice as DDP means it: with the strides of its parameter, if that is dense."""
    sizes = zip(parameter.shape, parameter.stride(), strict=True)
    last = sum((n - 1) * stride for n, stride in sizes)  # where its last element lies
    span = last + 1
    if parameter.is_contiguous() or span != parameter.numel():
        return gradient
    return gradient.as_strided(parameter.shape, parameter.stride())


def _future(buffer: Tensor) -> torch.futures.Future[Tensor]:
    """A future of a bucket's buffer."""
    return torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
