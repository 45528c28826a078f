"""What nodes report to the Flower engine beside their ballots: metrics and buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message
from torch import Tensor, nn

from signvote import Layout
from signvote.engines.flower import SignVote, score, vote
from signvote.engines.flower.records import BUFFERS, MODEL, to_buffer
from tests.flower_grid import LocalGrid
from tests.test_flower import NODES, PACKED, fresh, grid_of, honest, train


def test_evaluation_on_the_nodes() -> None:
    def client(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train":
            return honest(message, context)
        model = fresh(seed=98)
        return score(message, context, model, lambda: {"first": float(model.state_dict()["weight"][0, 0])})

    grid, model = grid_of(client, client, client), fresh()
    strategy = SignVote(Layout.of(model), evaluate_every=2)
    result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=4)
    assert set(result.evaluate_metrics_clientapp) == {2, 4}
    now = strategy.model["weight"][0, 0].item()
    assert result.evaluate_metrics_clientapp[4]["first"] == pytest.approx(now)
    assert max(grid.bytes_down[3:6]) < PACKED + 2500


def test_a_metric_that_is_not_finite_is_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    odd = iter([float("nan"), 1.0, float("inf")] * 2)

    def client(message: Message, context: Context) -> Message:
        value = next(odd)
        if message.metadata.message_type == "evaluate":
            return score(message, context, fresh(seed=98), lambda: {"accuracy": value, "none": float("nan")})
        reply = honest(message, context)
        reply.content["metrics"]["loss"] = value  # type: ignore[assignment]
        return reply

    model = fresh()
    strategy = SignVote(Layout.of(model), evaluate_every=1)
    result = strategy.start(grid_of(client, client, client), ArrayRecord(model.state_dict()), num_rounds=1)
    trained = result.train_metrics_clientapp[1]
    assert (trained["ballots"], trained["loss"], trained["loss-left-out"]) == (3, 1.0, 2)
    evaluated = dict(result.evaluate_metrics_clientapp[1])
    assert evaluated == {"accuracy": 1.0, "accuracy-left-out": 2, "none-left-out": 3}
    assert "round 1: metrics that are not finite: {'loss-left-out': 2}" in caplog.text


def test_of_many_metrics_those_that_most_nodes_report_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    def client(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train":
            return honest(message, context)
        mine = {"accuracy": 0.5}
        if context.node_id == NODES[1]:  # the smallest id: it answers first
            mine = {f"{i}": 1.0 for i in range(1000)} | mine
        if context.node_id == NODES[2]:
            mine |= {f"mine {i}": 1.0 for i in range(90)}
        return score(message, context, fresh(seed=98), lambda: mine)

    model = fresh()
    strategy = SignVote(Layout.of(model), evaluate_every=1)
    result = strategy.start(grid_of(client, client, client), ArrayRecord(model.state_dict()), num_rounds=2)
    for t in (1, 2):
        kept = result.evaluate_metrics_clientapp[t]
        assert len(kept) == 100
        assert kept["accuracy"] == 0.5
    assert caplog.text.count("round 1: a node reports 1001 metrics; 100 are kept") == 1
    assert "metrics; 100 are kept" not in caplog.text.replace("1001 metrics; 100 are kept", "", 1), (
        "said once"
    )


# ---- buffers -----------------------------------------------------------------------------------------


class Normed(nn.Module):
    """Batch norm, a frozen parameter, and a buffer that is no part of the model's state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 2)
        self.out.bias.requires_grad_(False)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.norm(x))
        return out


def normed(message: Message, context: Context) -> Message:
    """Each node sees inputs of a mean of its own."""
    model = Normed()

    def loss(step: int) -> Tensor:
        found: Tensor = (model(torch.randn(16, 4) + context.node_id % 7) ** 2).mean()
        return found

    return vote(message, context, model, loss, batch_size=16)


def train_normed(grid: LocalGrid, rounds: int, **settings: Any) -> tuple[dict[str, Tensor], list[bool]]:
    """The arrays of the result, and whether nodes were asked for buffers, by message."""
    asked: list[bool] = []
    ask = grid.answer

    def noting(node: int, message: Message) -> Message | None:
        asked.append(bool(message.content.config_records["signvote"]["buffers"]))
        return ask(node, message)

    grid.answer = noting  # type: ignore[method-assign]
    model = Normed()
    strategy = SignVote(Layout.of(model), **settings)
    result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=rounds)
    return dict(result.arrays.to_torch_state_dict()), asked


def of_nodes(grid: LocalGrid, name: str) -> Tensor:
    models = [grid.contexts[node].state.array_records[MODEL].to_torch_state_dict() for node in NODES]
    return torch.stack([model[name] for model in models])


STATISTICS = ("norm.running_mean", "norm.running_var")


def test_a_round_that_decides_nothing_moves_no_buffer() -> None:
    before = Normed().state_dict()
    arrays, _ = train_normed(grid_of(normed, normed, normed), 2, min_voters=4)
    for name, tensor in before.items():
        assert torch.equal(arrays[name], tensor), name


def test_the_result_has_the_median_of_the_nodes_buffers() -> None:
    grid = grid_of(normed, normed, normed)
    arrays, asked = train_normed(grid, 5)
    assert all(asked)
    for name in STATISTICS:
        each = of_nodes(grid, name)
        assert not torch.equal(each[0], each[1])
        assert torch.equal(arrays[name], each.median(0).values)
    assert torch.equal(arrays["out.bias"], Normed().out.bias)


def test_buffers_are_sent_every_k_rounds_and_in_the_last() -> None:
    grid = grid_of(normed, normed, normed)
    arrays, asked = train_normed(grid, 5, buffers_every=2)
    assert asked[::3] == [False, True, False, True, True]
    assert torch.equal(arrays[STATISTICS[0]], of_nodes(grid, STATISTICS[0]).median(0).values)
    arrays, asked = train_normed(grid_of(normed, normed, normed), 3, buffers_every=0)
    assert not any(asked)
    assert torch.equal(arrays[STATISTICS[0]], torch.zeros(4)), "the buffers of the initial arrays"


def test_a_model_without_buffers_is_not_asked_for_them() -> None:
    grid = grid_of()
    train(grid, 2)
    assert all(size < PACKED + 2500 for size in grid.bytes_up)


HOSTILE = {
    "nan": torch.full((4,), float("nan")),
    "huge": torch.full((4,), 1e30),
    "negative": torch.full((4,), -1e30),
    "longer": torch.zeros(5),
    "empty": torch.zeros(0),
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_minority_cannot_spoil_the_buffers(attack: str) -> None:
    def hostile(message: Message, context: Context) -> Message:
        reply = normed(message, context)
        names = [*STATISTICS, "out.bias", "norm.weight", "unknown"]
        reply.content[BUFFERS] = ArrayRecord({name: to_buffer(HOSTILE[attack]) for name in names})
        return reply

    grid = grid_of(hostile, normed, normed)
    arrays, _ = train_normed(grid, 3)
    for name in STATISTICS:
        honest_ones = of_nodes(grid, name)[1:]
        assert (arrays[name] >= honest_ones.amin(0)).all()
        assert (arrays[name] <= honest_ones.amax(0)).all()
    assert torch.equal(arrays["out.bias"], Normed().out.bias)
    assert arrays["norm.weight"].isfinite().all()
