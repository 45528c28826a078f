"""States: one that nobody could have written is refused, and a fresh one loads."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from signvote import Layout, Server, StateError, checkpoint
from signvote.core.rules import RULES
from signvote.core.vote import Voters, empty_decision
from signvote.kernels import Coin
from tests.test_trust import sent, stacked


def servers() -> list[Server]:
    """One of each rule that learns, after some rounds."""
    found = []
    layout = Layout([("x", (100,))])
    for name in ("weighted", "it-signsgd", "robust"):
        server = Server(layout, name)
        for t in range(1, 6):
            y = sent([0.1, 0.2, 0.3, 0.4], 100)
            server.learn(t, server.rule.vote(empty_decision(100, Coin(t)), stacked(y), Coin(t)))
        found.append(server)
    return found


def tensors(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all tensors of a state."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from tensors(value, (*path, key))
        elif isinstance(value, Tensor):
            yield (*path, key)


@pytest.mark.parametrize("server", servers(), ids=lambda server: server.rule.name)
def test_impossible_counts_are_refused_and_nothing_is_lost(server: Server) -> None:
    good = server.state_dict()
    voters = Voters(workers=(0, 1, 2, 3))
    before = server.rule.weights(voters)
    for path in tensors(good["rule"]):
        for value in (-1, 40_000, float("nan")):
            bad = copy.deepcopy(good)
            part = bad["rule"]
            for key in path:
                part = part[key]
            if part.dtype == torch.uint16:
                part = part.view(torch.int16)
                value = -1 if value != value else value % 65536 - 65536 * (value % 65536 >= 32768)
            part.view(-1)[0] = value
            with pytest.raises(StateError, match="impossible"):
                server.load_state_dict(bad)
            assert torch.equal(server.rule.weights(voters), before)
    server.load_state_dict(good)


@pytest.mark.parametrize("server", servers(), ids=lambda server: server.rule.name)
def test_a_state_with_parts_missing_is_refused(server: Server) -> None:
    good = server.state_dict()
    keys = [("rule", key) for key in good["rule"]] + [(key,) for key in good if key not in ("seen", "watch")]
    for path in keys:
        bad = copy.deepcopy(good)
        part = bad
        for key in path[:-1]:
            part = part[key]
        del part[path[-1]]
        with pytest.raises(StateError):
            server.load_state_dict(bad)


@pytest.mark.parametrize("name", RULES)
def test_a_fresh_state_loads(name: str, tmp_path: Path) -> None:
    layout = Layout([("x", (100,))])
    server = Server(layout, name)
    for state in (server.state_dict(), Server(layout, name).state_dict()):
        checkpoint.save(tmp_path / "fresh", state)
        server.load_state_dict(checkpoint.load(tmp_path / "fresh"))
        votes = replace(stacked(sent([0.1], 100)), claims=torch.zeros((1, 1), dtype=torch.int8))
        server.learn(1, server.rule.vote(empty_decision(100, Coin(1)), votes, Coin(1)))
        server.forget(0)  # the only worker


@pytest.mark.parametrize("server", servers(), ids=lambda server: server.rule.name)
def test_a_state_that_names_a_worker_twice_is_refused(server: Server) -> None:
    bad = copy.deepcopy(server.state_dict())
    parts = [part for part in (bad["rule"], *bad["rule"].values()) if isinstance(part, dict)]
    for part in parts:
        if "workers" in part:
            part["workers"][1] = part["workers"][0]
    with pytest.raises(StateError, match="4 workers in the state, but only 3 different ones"):
        server.load_state_dict(bad)
