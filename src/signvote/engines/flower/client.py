"""The node's side: a user's model and loss become a ballot.

A ClientApp lives for one message; `Context.state` lives as long as the SuperNode. So the state keeps the model, the
worker's momentum and the last round applied. In an ordinary round the server sends only the decision, and the node
sends only its ballot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import fields
from hashlib import blake2b
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn

from signvote.core.encoding import Encoding
from signvote.core.samples import SampleCount
from signvote.core.worker import Worker
from signvote.engines.flower.records import (
    BALLOT,
    BUFFERS,
    DECISIONS,
    INSTRUCTION,
    METRICS,
    MODEL,
    NOTHING,
    STATUS,
    from_lists,
    to_array,
    to_buffer,
)
from signvote.errors import BallotError, StateError

# Keys in Context.state, beside MODEL.
WORKER = "signvote.worker"
AVERAGES = "signvote.averages"

TENSORS = (
    "average",
    "residual",
    "belief",
    "outer",
    "ballot",
)  # entries of a worker's state that an ArrayRecord holds

Instruction = dict[str, Any]


def vote(
    message: Message,
    context: Context,
    model: nn.Module,
    loss: Callable[[int], Tensor],
    *,
    batch_size: int | None = None,
) -> Message:
    """One round of one node: bring the model up to date, compute gradients, answer with a ballot.

    With `local_steps=1` the ballot holds the signs of the gradient. With K, the node makes K local steps of plain SGD,
    votes on the signs of the change, and undoes the steps. Randomness is seeded by run, worker and round.

    Args:
        message: from `SignVote`, as `@app.train()` gets it.
        context: the node's context; its state is written.
        model: a new model of the right shape; its values come from the server.
        loss: the mean loss over the batch of a step; steps count from 0, over all rounds.
        batch_size: samples of a step, declared to the server for the rules that use it; 0: not declared. None: the
            first dimension of the batches that pass through the model, evaluation aside.

    """
    instruction = _instruction(message)
    worker = _worker(instruction, model, batch_size or 0)
    if not _catch_up(message, context, worker, model):
        return _answer(message, RecordDict(), NOTHING)
    round = instruction["round"]
    local_steps = instruction["local_steps"]
    steps = range((round - 1) * local_steps, round * local_steps)
    with torch.random.fork_rng(devices=[]), closing(SampleCount(model)) as samples:
        torch.manual_seed(_seed(instruction))
        model.train()
        mean_loss = _descend(worker.parameters, loss, steps, instruction["local_rate"])
    examples = samples.total if batch_size is None else batch_size * local_steps
    worker.batch_size = math.ceil(examples / local_steps)  # of a step, as one that is given
    ballot = to_array(worker.ballot(round))
    metrics = {"loss": mean_loss, "num-examples": examples}
    content = RecordDict()
    content[BALLOT] = ArrayRecord({BALLOT: ballot})
    content[METRICS] = MetricRecord(metrics)
    if instruction.get("buffers"):
        content[BUFFERS] = _buffers(model)
    _keep(context, worker, model)
    return _answer(message, content, round - 1)


def _buffers(model: nn.Module) -> ArrayRecord:
    """The floating-point buffers that belong to the model's state, such as running statistics of batch norm."""
    kept = model.state_dict()
    found = {}
    for name, buffer in model.named_buffers():
        if name in kept and buffer.is_floating_point():
            found[name] = to_buffer(buffer)
    return ArrayRecord(found)


def score(
    message: Message,
    context: Context,
    model: nn.Module,
    metrics: Callable[[], Mapping[str, float]],
) -> Message:
    """Bring the model up to date and answer with its metrics; for `@app.evaluate()`."""
    instruction = _instruction(message)
    worker = _worker(instruction, model, 0)
    if not _catch_up(message, context, worker, model):
        return _answer(message, RecordDict(), NOTHING)
    model.eval()
    content = RecordDict()
    with torch.no_grad():
        content[METRICS] = MetricRecord(dict(metrics()))
    _keep(context, worker, model)
    return _answer(message, content, instruction["round"] - 1)


def _instruction(message: Message) -> Instruction:
    """The server's request and the settings for it."""
    return dict(message.content.config_records[INSTRUCTION])


def _worker(instruction: Instruction, model: nn.Module, batch_size: int) -> Worker:
    names = [field.name for field in fields(Encoding)]
    encoding = Encoding(**{name: instruction[name] for name in names if name in instruction})
    return Worker(
        model,
        instruction["worker"],
        run=instruction["run"],
        batch_size=batch_size,
        decay=instruction["decay"],
        factors=from_lists(instruction),
        encoding=encoding,
    )


def _seed(instruction: Instruction) -> int:
    text = f"{instruction['run']} {instruction['worker']} {instruction['round']}"
    digest = blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def _descend(
    parameters: Mapping[str, Tensor],
    loss: Callable[[int], Tensor],
    steps: range,
    rate: float,
) -> float:
    """Leave the gradient, or the change over several steps, in `.grad`; return the mean loss."""
    before: dict[str, Tensor] = {}
    if len(steps) > 1:
        before = {name: p.detach().clone() for name, p in parameters.items()}
    total = 0.0
    for step in steps:
        for p in parameters.values():
            p.grad = None
        value = loss(step)
        value.backward()  # type: ignore[no-untyped-call]
        total += float(value.detach())
        if before:
            _sgd_step_(parameters, rate)
    for name, start in before.items():
        p = parameters[name]
        p.grad = start - p.detach()
        p.data.copy_(start)
    return total / len(steps)


@torch.no_grad()
def _sgd_step_(parameters: Mapping[str, Tensor], rate: float) -> None:
    for p in parameters.values():
        if p.grad is not None:
            p.sub_(p.grad, alpha=rate)


def _catch_up(message: Message, context: Context, worker: Worker, model: nn.Module) -> bool:
    """Bring the model up to the server's last round; False if the node cannot, and needs the whole model."""
    instruction = _instruction(message)
    received = message.content.array_records
    has_state = _load_worker(context, worker)
    if MODEL in received:
        model.load_state_dict(received[MODEL].to_torch_state_dict())
        worker.applied_round = instruction["model_round"]
    elif has_state:
        model.load_state_dict(context.state.array_records[MODEL].to_torch_state_dict())
    else:
        return False
    try:
        for round, step in zip(instruction["decided"], instruction["steps"], strict=True):
            if worker.applied_round is not None and round > worker.applied_round:
                decision = received[DECISIONS][str(round)].data
                worker.apply(decision, step)
    except BallotError:
        return False
    last_round = int(instruction["round"]) - 1
    return worker.applied_round == last_round


def _load_worker(context: Context, worker: Worker) -> bool:
    """Load the worker's state after its last round; False if the node has none of this run."""
    if WORKER not in context.state:
        return False
    tensors = context.state.array_records[AVERAGES].to_torch_state_dict()
    state: dict[str, Any] = dict(context.state.config_records[WORKER])
    for name in TENSORS:
        state[name] = tensors.get(name)
    try:
        worker.load_state_dict(state)
    except StateError:
        return False
    return True


def _keep(context: Context, worker: Worker, model: nn.Module) -> None:
    state = worker.state_dict()
    tensors = {name: state.pop(name) for name in TENSORS}
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    context.state[MODEL] = ArrayRecord(model.state_dict())
    context.state[AVERAGES] = ArrayRecord(present)
    context.state[WORKER] = ConfigRecord(state)


def _answer(message: Message, content: RecordDict, applied: int) -> Message:
    content[STATUS] = ConfigRecord({"applied": applied})
    return Message(content, reply_to=message)
