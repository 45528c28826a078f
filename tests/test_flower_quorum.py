"""Flower: too few votes move nothing, and what is noticed is in the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message

from signvote import Layout
from signvote.engines.flower import QuorumError, SignVote, vote
from signvote.engines.flower.records import MODEL
from tests.flower_grid import Client
from tests.test_flower import BAD, NODES, fresh, grid_of, honest, mean_loss, same, sends, train


def abstains(message: Message, context: Context) -> Message:
    model = fresh(seed=99)
    return vote(message, context, model, lambda step: mean_loss(model, context.node_id, step) * torch.nan)


@pytest.mark.parametrize(
    ("clients", "settings"),
    [
        ((honest, abstains, abstains), {"min_voters": 2}),
        ((abstains, abstains, abstains), {"min_ballots": 0}),
    ],
)
def test_below_the_quorum_nothing_moves_and_the_log_says_so(
    clients: tuple[Client, ...], settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Not by weight decay either, on the server and on the nodes; the next round continues."""
    grid, model = grid_of(*clients), fresh()
    strategy = SignVote(Layout.of(model), decay=0.5, momentum=0.9, **settings)
    result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=2)
    assert same(strategy.model, dict(model.state_dict()))
    assert not strategy.server.report.is_decided
    assert strategy.server.watch.undecided == 2
    assert [result.train_metrics_clientapp[t]["decided"] for t in (1, 2)] == [0, 0]
    for t in (1, 2):
        assert f"signvote: round {t}: too few voted: no parameter moved" in caplog.text
    grid.clients = dict.fromkeys(NODES, honest)
    strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=4)
    assert strategy.server.report.is_decided
    kept = grid.contexts[NODES[0]].state.array_records[MODEL].to_torch_state_dict()
    assert not same(strategy.model, dict(model.state_dict()))
    assert not same(dict(kept), dict(model.state_dict()))
    assert strategy.server.watch.undecided == 2


def test_what_is_noticed_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def undeclared(message: Message, context: Context) -> Message:
        model = fresh(seed=99)
        return vote(
            message, context, model, lambda step: mean_loss(model, context.node_id, step), batch_size=0
        )

    train(grid_of(honest, honest, undeclared), 3)
    assert caplog.text.count("signvote: round 1: worker 1 declared no batch size, but 2 others did") == 1


def test_a_missed_quorum_is_an_error_that_loses_nothing(tmp_path: Path) -> None:
    saved = tmp_path / "run.safetensors"
    train(grid_of(), 2, checkpoint=saved, min_ballots=3)
    before = saved.read_bytes()
    grid = grid_of()
    grid.clients[NODES[1]] = sends(BAD["magic"])
    with pytest.raises(
        QuorumError, match=r"round 3: 2 of 3 nodes voted, min_ballots is 3 \(.*\); round 2 is in"
    ):
        train(grid, 4, checkpoint=saved, min_ballots=3)
    assert saved.read_bytes() == before
    went_on = train(grid_of(), 4, checkpoint=saved, min_ballots=3)
    assert same(went_on.model, train(grid_of(), 4).model)


def test_no_checkpoint_is_said_in_the_error() -> None:
    grid = grid_of()
    grid.online = {NODES[0]}
    model = fresh()
    strategy = SignVote(Layout.of(model), min_ballots=2)
    with pytest.raises(QuorumError, match="round 0 is the last complete one"):
        strategy.start(grid, ArrayRecord(model.state_dict()), timeout=0.1)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_same_strategy_goes_on_after_a_missed_quorum(momentum: float) -> None:
    """Two nodes are asked for round 3 twice: they answer with the same ballot, and momentum advances once."""
    grid, model = grid_of(), fresh()
    strategy = SignVote(Layout.of(model), min_ballots=3, momentum=momentum)
    strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=2)
    grid.online = set(NODES[:2])
    with pytest.raises(QuorumError):
        strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=4, timeout=0.1)
    grid.online = set(NODES)
    strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=4)
    assert same(strategy.model, train(grid_of(), 4, momentum=momentum).model)
