"""The bound of the rule `mean`: a worker that pushes harder than it claims is not heard. Laws, then engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from signvote import ConfigError, Layout, Server, StateError
from signvote.core import chunks as chunks_module
from signvote.core import loudness as loudness_module
from signvote.core.ballot import parse
from signvote.core.bits import unpack_signs
from signvote.core.discord import compared
from signvote.core.joining import check_splits
from signvote.core.loudness import ONE, Loudness
from signvote.core.mean import Mean
from signvote.core.trust import Evidence
from signvote.core.vote import Voters, Votes, empty_decision
from signvote.kernels import Coin
from signvote.sim import Config
from signvote.sim.run import Run
from tests.ranks import config, simulated, task, together
from tests.test_mean import LAYOUT, Federation, M, N, both_ways, mean_of
from tests.test_optimizer_ranks import Script

ROUNDS = 60
EVERYBODY = Voters(workers=tuple(range(M)))


class Attacked(Federation):
    """Workers of which the last one sends the opposite of what it should, and believes that it was sent."""

    def __init__(self, bound: float | None = 1.5) -> None:
        super().__init__()
        self.server = Server(LAYOUT, "mean", bound=bound)
        pushed = self.workers[-1].encoder
        encode = pushed.encode

        def inverted(round: int, gradient: Tensor, **more: Any) -> Any:
            planes = encode(round, gradient, **more)
            return planes and planes._replace(signs=planes.signs ^ FULL)

        pushed.encode = inverted  # type: ignore[method-assign]


FULL = empty_decision(N, Coin(0, 0)).signs
FULL[:-1] = -1
FULL[-1] = (1 << N % 64) - 1


def loudness_of(server: Server) -> Loudness:
    assert isinstance(server.rule, Mean)
    assert server.rule.trust is not None
    return server.rule.trust


def right(federation: Federation) -> float:
    """The share of the signs of the honest workers' mean that the server decides, where that is clear."""
    honest = federation.gradients[:-1].mean(0)
    clear = honest.abs() > honest.abs().median()
    return float((mean_of(federation.server).sign() == honest.sign())[clear].float().mean())


# ---- laws ----------------------------------------------------------------------------------------


def test_an_honest_worker_keeps_its_weight_and_one_that_pushes_has_none() -> None:
    federation = Attacked()
    for t in range(1, ROUNDS):
        federation.round(t)
    factors = loudness_of(federation.server).factors(range(M))
    assert (factors[:-1] == ONE).all()
    assert factors[-1] < 0.02 * ONE
    weights = federation.server.rule.weights(EVERYBODY)
    assert (weights[:-1] == weights[0]).all()
    assert (weights[-1] < 0.02 * weights[0]).all()


def test_a_push_that_ruins_the_mean_does_not_with_a_bound() -> None:
    shares = {}
    for bound in (None, 1.5):
        federation = Attacked(bound)
        for t in range(1, ROUNDS):
            federation.round(t)
        shares[bound] = right(federation)
    assert shares[None] < 0.7
    assert shares[1.5] > 0.9


def test_a_bound_that_nobody_reaches_changes_no_bit() -> None:
    plain, bounded = Federation(), Federation()
    bounded.server = Server(LAYOUT, "mean", bound=32.0)  # 1 / (1 - a)
    for t in range(1, 30):
        absent = (t % 7,) if t % 7 < M else ()
        assert plain.round(t, absent) == bounded.round(t, absent)
    assert torch.equal(mean_of(plain.server), mean_of(bounded.server))


def test_the_server_knows_what_it_believes_of_each_worker() -> None:
    federation = Attacked()
    for t in range(1, 20):
        federation.round(t, absent=(1,) if t % 3 else ())
    found = loudness_of(federation.server)
    assert found.sample.tolist() == list(range(N))  # a small model is its own sample
    assert torch.equal(found.beliefs[[found.index[m] for m in range(M)]], federation.beliefs())


def test_the_equation_of_the_factor() -> None:
    rule = Loudness(LAYOUT, 1.5)
    workers = (3, 8)
    sums = torch.tensor([[6 * 64 * N], [64 * N]])
    nothing = torch.zeros(2, 1, dtype=torch.int64)
    alike = compared(torch.ones(2, N))
    rule.learn(Evidence(workers=workers, mismatches=nothing, cast=nothing, beliefs=sums, **alike._asdict()))
    assert rule.factors((8, 3, 5)).tolist() == [
        ONE,
        ONE // 64,
        ONE,
    ]  # (1.5 / 6)^2 (3 / 6)^2; a new worker is believed


def test_a_server_that_owns_nothing_hears_nothing() -> None:
    rule = Loudness(LAYOUT, 1.5)
    rule.own([])
    rule.beliefs = torch.ones(1, N)
    rule.index = {4: 0}
    assert not rule.state_dict()["beliefs"].any()


def test_below_the_quorum_nothing_is_believed() -> None:
    federation = Attacked()
    federation.server = Server(LAYOUT, "mean", bound=1.5, min_voters=4)
    federation.round(1)
    before = loudness_of(federation.server).beliefs.clone()
    federation.round(2, absent=(0, 1))
    assert torch.equal(loudness_of(federation.server).beliefs, before)


# ---- the server ----------------------------------------------------------------------------------


def rounds_of_ballots() -> list[dict[int, bytes]]:
    federation = Attacked()
    for t in range(1, 12):
        federation.round(t, absent=(t % M,))
    return federation.sent


@pytest.mark.parametrize("size", [1, 7 * 24])
def test_chunks_and_the_order_of_arrival_change_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = rounds_of_ballots()
    server = Server(LAYOUT, "mean", bound=1.5)
    wanted = [server.decide(t, ballots) for t, ballots in enumerate(sent, 1)]
    monkeypatch.setattr(chunks_module, "STACK_BYTES", size)
    other = Server(LAYOUT, "mean", bound=1.5)
    for t, ballots in enumerate(sent, 1):
        opened = other.open(t)
        for m, ballot in reversed(ballots.items()):
            opened.add(m, ballot)
        assert opened.close() == wanted[t - 1]


def test_shards_decide_as_one_server_and_their_states_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loudness_module, "COUNT", 100)  # fewer than there are
    whole = Mean(LAYOUT, bound=1.5, secret=7)
    halves = [Mean(LAYOUT, bound=1.5, secret=7) for _ in range(2)]
    spans = [(0, 128), (128, N)]
    for half, span in zip(halves, spans, strict=True):
        half.own([span])
    for t, ballots in enumerate(rounds_of_ballots(), 1):
        parsed = [parse(ballot, layout=LAYOUT, run=0) for ballot in ballots.values()]
        out = empty_decision(N, Coin(t, 0))
        evidence = whole.vote(out, Votes.stack(parsed, 0, N), Coin(t, 0))
        parts = []
        for half, (start, stop) in zip(halves, spans, strict=True):
            part = empty_decision(stop - start, Coin(t, 0))
            parts.append(half.vote(part, Votes.stack(parsed, start, stop - start), Coin(t, start)))
            assert torch.equal(unpack_signs(part, stop - start), unpack_signs(out, N)[start:stop])
        total = parts[0] + parts[1]
        assert total.beliefs is not None
        assert evidence.beliefs is not None
        assert torch.equal(total.beliefs, evidence.beliefs)
        assert torch.equal(total.differ, evidence.differ)  # type: ignore[arg-type]
        for rule in (whole, *halves):
            rule.learn(total)
    joined = Mean(LAYOUT, bound=1.5, secret=7)
    joined.load_state_dict(*(half.state_dict() for half in halves))
    wanted, found = whole.state_dict(), joined.state_dict()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in ("beliefs", "sums", "mean"))


def test_a_resumed_server_continues_and_a_forgotten_worker_is_new() -> None:
    sent = rounds_of_ballots()
    server, other = (Server(LAYOUT, "mean", bound=1.5) for _ in range(2))
    for t, ballots in enumerate(sent[:6], 1):
        server.decide(t, ballots)
    other.load_state_dict(server.state_dict())
    for each in (server, other):
        each.forget(2)
        assert sorted(loudness_of(each).workers) == [0, 1, 3, 4]
    for t, ballots in enumerate(sent[6:], 7):
        assert server.decide(t, ballots) == other.decide(t, ballots)


def test_wrong_bounds_states_and_servers_are_refused() -> None:
    for bound in (0.5, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=f"bound is {bound}; it must be 1 or more"):
            Mean(LAYOUT, bound=bound)
    bounded = Mean(LAYOUT, bound=1.5)
    with pytest.raises(StateError, match="state of sample None cannot be loaded into sample"):
        bounded.load_state_dict(Mean(LAYOUT).state_dict())
    with pytest.raises(ConfigError, match="'mean' cannot be split among relays"):
        check_splits(bounded)
    found = Loudness(Layout([("a", (9,))]), 1.5)
    nothing = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ConfigError, match="loudness needs evidence about beliefs"):
        found.learn(Evidence(workers=(1,), mismatches=nothing, cast=nothing))
    wrong = {"workers": [1], "beliefs": torch.full((1, 9), float("nan")), "sums": torch.zeros(1)}
    with pytest.raises(StateError, match="beliefs that are not finite, or a negative loudness"):
        found.load_state_dict(wrong)


# ---- engines -------------------------------------------------------------------------------------

BOUNDED: dict[str, Any] = {"options": {"bound": 1.0}, "attack": "invert:1"}  # bites


@pytest.mark.parametrize("more", [{}, {"min_voters": 3, "miss": 0.2}], ids=str)
def test_the_joint_pass_sends_the_same_bits(more: dict[str, Any]) -> None:
    case = config("mean", 4, 10, momentum=0.9, **BOUNDED, **more)
    one, other = both_ways(case, 10)
    assert one.server is not None
    assert other.server is not None
    mine, its = loudness_of(one.server), loudness_of(other.server)
    for m in mine.workers:
        assert torch.equal(mine.beliefs[mine.index[m]], its.beliefs[its.index[m]])
    assert torch.equal(mine.factors(range(4)), its.factors(range(4)))
    assert (mine.factors(range(4)) < ONE).any()


def case_of(world: int) -> Config:
    return config("mean", world, 10, decay=0.5, options={"bound": 1.0})


def ranks(rank: int, world: int) -> tuple[list[int], list[float]]:
    script = Script(rank, case_of(world))
    sums = script.train(10)
    return sums, _pairs(script.optimizer.poll.server)


def _pairs(server: Server) -> list[float]:
    """How often workers differed."""
    differ, _ = loudness_of(server).pairs.among(range(3))
    counted: list[float] = differ.flatten().tolist()
    return counted


def test_torch_distributed_equals_the_simulator(tmp_path: Path) -> None:
    wanted = simulated(case_of(3))
    assert wanted != simulated(config("mean", 3, 10, decay=0.5))  # it does something here
    run = Run(case_of(3), task())
    for _ in range(10):
        run.step()
    assert run.server is not None
    pairs = _pairs(run.server)
    assert max(pairs) > 0
    assert together(3, ranks, folder=tmp_path) == [(wanted, pairs)] * 3
