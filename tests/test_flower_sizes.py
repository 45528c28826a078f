"""Nodes declare the sizes of their batches by themselves: the app passes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message
from torch import Tensor, nn

from signvote import ConfigError, Layout
from signvote.core.ballot import parse
from signvote.engines.flower import SignVote, vote
from signvote.engines.flower.records import ballot_in
from tests.flower_grid import Client, LocalGrid

SIZES = {11: 4, 12: 16, 13: 60}  # by node id


class Net(nn.Module):
    """A model that may be called with a batch in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(5, 3)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        outputs: Tensor = self.last(batch["inputs"])
        return outputs


def node(batches: Callable[[int, int], list[int]], **given: Any) -> Client:
    """A node whose loss is the mean over batches of these sizes, by node id and step."""

    def train(message: Message, context: Context) -> Message:
        model = Net()

        def loss(step: int) -> Tensor:
            with torch.no_grad():
                model({"inputs": torch.zeros(1000, 5)})  # a look at its own data, not a gradient
            sizes = batches(context.node_id, step)
            losses = [model({"inputs": torch.randn(size, 5)}).square().mean() for size in sizes]
            return torch.stack(losses).mean()

        reply = vote(message, context, model, loss, **given)
        assert not model._forward_pre_hooks
        return reply

    return train


class Listening(LocalGrid):
    """Keeps what nodes declare."""

    def __init__(self, client: Client) -> None:
        super().__init__(dict.fromkeys(SIZES, client))
        self.declared: dict[int, list[int]] = {node: [] for node in SIZES}
        self.examples: dict[int, list[Any]] = {node: [] for node in SIZES}

    def answer(self, node: int, message: Message) -> Message | None:
        reply = super().answer(node, message)
        assert reply is not None
        ballot = ballot_in(reply.content)
        assert ballot is not None
        parsed = parse(ballot, layout=Layout.of(Net()), run=0)
        self.declared[node].append(parsed.batch_size)
        self.examples[node].append(reply.content.metric_records["metrics"]["num-examples"])
        return reply


def run(client: Client, rounds: int = 2, **settings: Any) -> tuple[Listening, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Net()
    grid = Listening(client)
    strategy = SignVote(Layout.of(model), "weighted", **settings)
    strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=rounds)
    return grid, strategy.model


def test_nodes_declare_the_batch_that_they_used() -> None:
    grid, _ = run(node(lambda id, step: [SIZES[id]]))
    assert grid.declared == {id: [size, size] for id, size in SIZES.items()}
    assert grid.examples == grid.declared


def test_a_smaller_last_batch_is_declared_as_such() -> None:
    grid, _ = run(node(lambda id, step: [3] if (id, step) == (13, 1) else [SIZES[id]]))
    assert grid.declared == {11: [4, 4], 12: [16, 16], 13: [60, 3]}


def test_batches_of_one_gradient_add_up() -> None:
    grid, _ = run(node(lambda id, step: [SIZES[id], 2]))
    assert grid.declared == {id: [size + 2] * 2 for id, size in SIZES.items()}


def test_local_steps_declare_the_batch_of_a_step() -> None:
    """Every node makes the same number of steps. A mean that is not whole is rounded up."""
    grid, _ = run(node(lambda id, step: [SIZES[id] - step % 3]), local_steps=3, local_rate=0.01)
    assert grid.declared == {id: [size - 1] * 2 for id, size in SIZES.items()}
    assert grid.examples == {id: [3 * size - 3] * 2 for id, size in SIZES.items()}
    grid, _ = run(node(lambda id, step: [SIZES[id] + step % 2]), local_steps=2, local_rate=0.01)
    assert grid.declared == {id: [size + 1] * 2 for id, size in SIZES.items()}


def test_a_size_that_the_app_gives_wins_and_0_declares_nothing() -> None:
    for given in (7, 0):
        grid, _ = run(node(lambda id, step: [SIZES[id]], batch_size=given), local_steps=2, local_rate=0.01)
        assert grid.declared == {id: [given] * 2 for id in SIZES}
        assert grid.examples == {id: [2 * given] * 2 for id in SIZES}


def test_a_batch_that_does_not_pass_through_the_model_is_not_declared() -> None:
    def direct(message: Message, context: Context) -> Message:
        model = Net()
        return vote(message, context, model, lambda step: model.last(torch.randn(8, 5)).square().mean())

    grid, _ = run(direct)
    assert grid.declared == {id: [0, 0] for id in SIZES}


def test_counted_sizes_decide_as_given_ones() -> None:
    """The rule that weighs by sizes sees no difference."""

    def given(message: Message, context: Context) -> Message:
        size = SIZES[context.node_id]
        return node(lambda id, step: [size], batch_size=size)(message, context)

    _, wanted = run(given, rounds=5)
    _, counted = run(node(lambda id, step: [SIZES[id]]), rounds=5)
    assert all(torch.equal(counted[name], wanted[name]) for name in wanted)


def test_a_size_out_of_range_is_refused() -> None:
    client = node(lambda id, step: [4], batch_size=-1)

    def train(message: Message, context: Context) -> Message:
        with pytest.raises(ConfigError, match=r"batch_size is -1; it must lie in 0..2\^32-1"):
            client(message, context)
        return node(lambda id, step: [4])(message, context)

    grid, _ = run(train, rounds=1)
    assert grid.declared == {id: [4] for id in SIZES}
