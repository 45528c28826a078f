"""The node's side: a user's model and loss to a ballot.

A ClientApp lives for one message; `Context.state` lives as long as the SuperNode. So the model, the
worker's momentum and the last round applied are kept there, and of an ordinary round only the decision
comes down and only the ballot goes up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from hashlib import blake2b
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn

from signvote.core.encoder import Encoding
from signvote.core.worker import Worker
from signvote.engines.flower.records import (
    BALLOT,
    DECISIONS,
    METRICS,
    MODEL,
    NOTHING,
    ORDER,
    STATUS,
    to_array,
)
from signvote.errors import BallotError, StateError

MINE, AVERAGES = "signvote.worker", "signvote.averages"  # in Context.state, beside MODEL
LENT = ("average", "residual")  # tensors of a worker's state


def vote(
    message: Message,
    context: Context,
    model: nn.Module,
    loss: Callable[[int], Tensor],
    *,
    batch_size: int = 0,
) -> Message:
    """A round of one node: bring the model up to date, compute, answer with a ballot.

    With `local_steps=1` the ballot holds the signs of the gradient; with K, those of what K local steps
    of plain SGD changed, which are then taken back. Randomness is seeded by run, worker and round.

    Args:
        message: of `SignVote`, as `@app.train()` gets it.
        context: the node's; its state is written.
        model: a fresh one of the right shape; its values do not matter, they come from the server.
        loss: the mean loss over the batch of a step; steps count from 0, over all rounds.
        batch_size: declared to the server, for the rules that use it; 0: not declared.

    """
    order = _order(message)
    worker = _worker(order, model, batch_size)
    if not _catch_up(message, context, worker, model):
        return _answer(message, RecordDict(), NOTHING)
    round, steps = order["round"], order["local_steps"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_seed(order))
        model.train()
        mean = _descend(
            worker.parameters, loss, range((round - 1) * steps, round * steps), order["local_rate"]
        )
    content = RecordDict({BALLOT: ArrayRecord({BALLOT: to_array(worker.ballot(round))})})
    content[METRICS] = MetricRecord({"loss": mean, "num-examples": batch_size * steps})
    _keep(context, worker, model)
    return _answer(message, content, round - 1)


def score(
    message: Message, context: Context, model: nn.Module, metrics: Callable[[], Mapping[str, float]]
) -> Message:
    """Bring the model up to date and answer with metrics of it; for `@app.evaluate()`."""
    order = _order(message)
    worker = _worker(order, model, 0)
    if not _catch_up(message, context, worker, model):
        return _answer(message, RecordDict(), NOTHING)
    model.eval()
    with torch.no_grad():
        content = RecordDict({METRICS: MetricRecord(dict(metrics()))})
    _keep(context, worker, model)
    return _answer(message, content, order["round"] - 1)


def _order(message: Message) -> dict[str, Any]:
    """What the server asks, and with what settings."""
    return dict(message.content.config_records[ORDER])


def _worker(order: dict[str, Any], model: nn.Module, batch_size: int) -> Worker:
    encoding = Encoding(**{f.name: order[f.name] for f in fields(Encoding) if f.name in order})
    return Worker(
        model,
        order["worker"],
        run=order["run"],
        batch_size=batch_size,
        decay=order["decay"],
        encoding=encoding,
    )


def _seed(order: dict[str, Any]) -> int:
    text = f"{order['run']} {order['worker']} {order['round']}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 1


def _descend(
    parameters: Mapping[str, Tensor], loss: Callable[[int], Tensor], steps: range, rate: float
) -> float:
    """Leave the gradient, or what several steps changed, in `.grad`; return the mean loss."""
    start = {name: p.detach().clone() for name, p in parameters.items()} if len(steps) > 1 else {}
    total = 0.0
    for step in steps:
        for p in parameters.values():
            p.grad = None
        value = loss(step)
        value.backward()  # type: ignore[no-untyped-call]
        total += float(value.detach())
        with torch.no_grad():
            for name in start:
                if (gradient := parameters[name].grad) is not None:
                    parameters[name].sub_(gradient, alpha=rate)
    for name, before in start.items():
        parameters[name].grad = before - parameters[name].detach()
        parameters[name].data.copy_(before)
    return total / len(steps)


def _catch_up(message: Message, context: Context, worker: Worker, model: nn.Module) -> bool:
    """Make the model the server's; False: what the node has and what it was sent do not add up."""
    order, sent = _order(message), message.content.array_records
    remembered = _remember(context, worker)
    if MODEL in sent:
        model.load_state_dict(sent[MODEL].to_torch_state_dict())
        worker.applied_round = order["model_round"]
    elif remembered:
        model.load_state_dict(context.state.array_records[MODEL].to_torch_state_dict())
    else:
        return False
    try:
        for round, step in zip(order["decided"], order["steps"], strict=True):
            if worker.applied_round is not None and round > worker.applied_round:
                worker.apply(sent[DECISIONS][str(round)].data, step)
    except BallotError:
        return False
    return worker.applied_round == int(order["round"]) - 1


def _remember(context: Context, worker: Worker) -> bool:
    """Load what the worker knew after its last round; False: nothing of this run."""
    if MINE not in context.state:
        return False
    averages = context.state.array_records[AVERAGES].to_torch_state_dict()
    state = dict(context.state.config_records[MINE]) | {name: averages.get(name) for name in LENT}
    try:
        worker.load_state_dict(state)
    except StateError:
        return False
    return True


def _keep(context: Context, worker: Worker, model: nn.Module) -> None:
    state = worker.state_dict()
    tensors = {name: state.pop(name) for name in LENT}
    context.state[MODEL] = ArrayRecord(model.state_dict())
    context.state[AVERAGES] = ArrayRecord({k: v for k, v in tensors.items() if v is not None})
    context.state[MINE] = ConfigRecord(state)


def _answer(message: Message, content: RecordDict, applied: int) -> Message:
    content[STATUS] = ConfigRecord({"applied": applied})
    return Message(content, reply_to=message)
