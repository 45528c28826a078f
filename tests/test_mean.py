"""The rule `mean`: votes that are corrections. Laws first, through ballots; then the engines."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from signvote import BallotError, ConfigError, Layout, Server, StateError, Vote, Worker
from signvote.core import chunks as chunks_module
from signvote.core.ballot import parse
from signvote.core.bits import unpack_signs
from signvote.core.corrections import LEAK, claims, scales
from signvote.core.header import Kind
from signvote.core.mean import Mean
from signvote.core.powers import agreed
from signvote.core.vote import Votes, empty_decision
from signvote.kernels import Coin
from signvote.sim import Config
from signvote.sim.machine import Machine
from signvote.sim.run import Run
from tests.ranks import config, simulated, task, together
from tests.test_optimizer_ranks import Script

LAYOUT = Layout([("a", (10, 13)), ("b", (70,)), ("c", (100,))])
N = LAYOUT.size
M = 5


class Federation:
    """Workers whose gradients are unlike, around a server; by bytes."""

    def __init__(self, sizes: tuple[int, ...] = (4,) * M, **more: Any) -> None:
        random = torch.Generator().manual_seed(1)
        spread = torch.tensor([0.1, 0.5, 1.0, 2.0, 5.0])[:, None]
        self.gradients = torch.randn(M, N, generator=random) * spread
        self.weights = torch.tensor(sizes, dtype=torch.float64)
        self.params = [{name: torch.zeros(shape) for name, shape in _shapes().items()} for _ in range(M)]
        self.workers = [
            Worker(params, m, corrects=True, batch_size=size, **more)
            for m, (params, size) in enumerate(zip(self.params, sizes, strict=True))
        ]
        self.server = Server(LAYOUT, "mean")
        self.sent: list[dict[int, bytes]] = []

    def round(self, t: int, absent: tuple[int, ...] = ()) -> bytes:
        ballots = {}
        for m, worker in enumerate(self.workers):
            if m not in absent:
                for segment in LAYOUT.segments:
                    gradient = self.gradients[m, segment.start : segment.stop]
                    self.params[m][segment.name].grad = gradient.view(segment.shape).clone()
                ballots[m] = worker.ballot(t)
        self.sent.append(ballots)
        decision = self.server.decide(t, ballots)
        for worker in self.workers:
            worker.apply(decision, 1e-3)
        return decision

    def beliefs(self) -> Tensor:
        return torch.stack([_belief(worker) for worker in self.workers])


def _shapes() -> dict[str, tuple[int, ...]]:
    return {segment.name: segment.shape for segment in LAYOUT.segments}


def _belief(worker: Worker) -> Tensor:
    belief = worker.encoder.memory.belief
    assert belief is not None
    return belief


def mean_of(server: Server) -> Tensor:
    assert isinstance(server.rule, Mean)
    return server.rule.mean


# ---- laws ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(4,) * M, (4, 4, 16, 64, 256)])
def test_the_server_holds_the_weighted_mean_of_what_it_believes(sizes: tuple[int, ...]) -> None:
    federation = Federation(sizes)
    weights = federation.weights / federation.weights.sum()
    for t in range(1, 60):
        federation.round(t)
        wanted = (weights[:, None] * federation.beliefs().double()).sum(0)
        assert torch.allclose(mean_of(federation.server).double(), wanted, atol=1e-3)


def test_the_mean_is_decided_where_signs_would_decide_otherwise() -> None:
    federation = Federation()
    for t in range(1, 200):
        decision = federation.round(t)
    signs = unpack_signs(parse(decision, layout=LAYOUT, run=0).planes(), N)
    mean = federation.gradients.mean(0)
    majority = federation.gradients.sign().sum(0).sign()
    clear = mean.abs() > mean.abs().median()
    assert (signs == mean.sign())[clear].float().mean() > 0.98
    assert (majority == mean.sign())[clear].float().mean() < 0.9


def test_what_is_believed_follows_what_a_worker_wants() -> None:
    federation = Federation()
    for t in range(1, 300):
        federation.round(t)
    m, h = federation.gradients[2], _belief(federation.workers[2])
    scale = 2.0 ** int(claims(federation.gradients, LAYOUT)[2, 2])
    reachable = m[200:].abs() < scale / (1 - LEAK)
    assert ((h - m)[200:][reachable].abs() < 3 * scale).float().mean() > 0.95


def test_a_ballot_that_was_not_counted_does_not_move_its_worker() -> None:
    federation = Federation()
    for t in range(1, 10):
        federation.round(t)
    before = federation.beliefs()
    federation.round(10, absent=(1, 3))
    after = federation.beliefs()
    assert torch.equal(after[[1, 3]], before[[1, 3]] * LEAK)
    assert not torch.equal(after[0], before[0] * LEAK)


def test_a_refused_ballot_does_not_move_its_worker() -> None:
    """The worker sent it, and learns from the decision that it was not counted."""
    federation = Federation()
    federation.round(1)
    worker = federation.workers[0]
    before = _belief(worker).clone()
    for m, each in enumerate(federation.workers):
        each.ballot(2)
        assert m < M
    damaged = bytearray(worker.ballot(2))
    damaged[70] ^= 1
    others = {m: each.ballot(2) for m, each in enumerate(federation.workers) if m}
    decision = federation.server.decide(2, {0: bytes(damaged), **others})
    worker.apply(decision, 1e-3)
    assert torch.equal(_belief(worker), before * LEAK)


def test_a_retry_sends_the_same_bytes_and_a_resumed_worker_continues() -> None:
    federation, other = Federation(momentum=0.5), Federation(momentum=0.5)
    for t in range(1, 8):
        federation.round(t)
        other.round(t)
    worker = other.workers[2]
    state = copy.deepcopy(worker.state_dict())
    fresh = Worker(other.params[2], 2, corrects=True, momentum=0.5, batch_size=4)
    fresh.load_state_dict(state)
    other.workers[2] = fresh
    assert fresh.ballot(8) == fresh.ballot(8)
    server = Server(LAYOUT, "mean")
    server.load_state_dict(other.server.state_dict())
    other.server = server
    assert [federation.round(t) for t in range(8, 12)] == [other.round(t) for t in range(8, 12)]


def test_after_copied_parameters_a_belief_has_leaked_away() -> None:
    federation = Federation()
    for t in range(1, 5):
        federation.round(t)
    worker = federation.workers[0]
    before = _belief(worker).clone()
    worker.applied_round = 14
    assert torch.equal(_belief(worker), before * LEAK**10)


def test_below_the_quorum_nothing_moves_and_nothing_is_believed() -> None:
    federation = Federation()
    federation.server = Server(LAYOUT, "mean", min_voters=4)
    federation.round(1)
    before, mean = federation.beliefs(), mean_of(federation.server).clone()
    federation.round(2, absent=(0, 1))
    assert not federation.server.report.is_decided
    assert torch.equal(federation.beliefs(), before)
    assert torch.equal(mean_of(federation.server), mean)


@pytest.mark.parametrize("bound", [None, 1.5])
def test_the_equations_of_the_page_are_what_is_decided(bound: float | None) -> None:
    """docs/unlike-data.md by hand: b, h, S, f and G."""
    federation = Federation((4, 4, 16, 64, 256))
    federation.server = Server(LAYOUT, "mean", bound=bound)
    a = 31 / 32
    m, w = federation.gradients.double(), federation.weights[:, None]
    spans = [range(segment.start, segment.stop) for segment in LAYOUT.segments]
    means = torch.stack([m[:, list(span)].abs().mean(1) for span in spans], 1)
    claimed = 2.0 ** means.log2().round()
    counts = claimed.minimum(2 * claimed.median(0).values)
    scale = torch.cat([counts[:, [g]].expand(-1, len(span)) for g, span in enumerate(spans)], 1)
    h, mean, f = torch.zeros_like(m), torch.zeros(N).double(), torch.ones(M, 1).double()
    for t in range(1, 40):
        b = (m - a * h).sign()
        h = a * h + scale * b
        mean = a * mean + (w * f * scale * b).sum(0) / w.sum()
        if bound is not None:
            loudness = (h.abs() / scale).mean(1, keepdim=True)
            f = (bound / loudness).clamp_max(1) ** 2
        signs = unpack_signs(parse(federation.round(t), layout=LAYOUT, run=0).planes(), N)
        clear = mean.abs() > 0.02 * scale.max()
        assert clear.float().mean() > 0.5
        assert torch.equal(signs[clear], mean[clear].sign().to(torch.int8))
    assert bool((f < 1).any()) == (bound is not None)


# ---- the server ----------------------------------------------------------------------------------


def rounds_of_ballots() -> list[dict[int, bytes]]:
    federation = Federation((4, 8, 16, 32, 64))
    for t in range(1, 8):
        federation.round(t, absent=(t % M,))
    return federation.sent


@pytest.mark.parametrize("size", [1, 7 * 8, 7 * 24])
def test_chunks_and_the_order_of_arrival_change_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = rounds_of_ballots()
    server = Server(LAYOUT, "mean")
    wanted = [server.decide(t, ballots) for t, ballots in enumerate(sent, 1)]
    monkeypatch.setattr(chunks_module, "STACK_BYTES", size)
    other = Server(LAYOUT, "mean")
    assert [other.decide(t, reversed(ballots.items())) for t, ballots in enumerate(sent, 1)] == wanted


def test_shards_decide_as_one_server_and_their_states_join() -> None:
    whole = Mean(LAYOUT)
    halves = [Mean(LAYOUT), Mean(LAYOUT)]
    spans = [(0, 128), (128, N)]
    for half, span in zip(halves, spans, strict=True):
        half.own([span])
    for t, ballots in enumerate(rounds_of_ballots(), 1):
        parsed = [parse(ballot, layout=LAYOUT, run=0) for ballot in ballots.values()]
        out = empty_decision(N, Coin(t, 0))
        whole.vote(out, Votes.stack(parsed, 0, N), Coin(t, 0))
        for half, (start, stop) in zip(halves, spans, strict=True):
            part = empty_decision(stop - start, Coin(t, 0))
            half.vote(part, Votes.stack(parsed, start, stop - start), Coin(t, start))
            signs = unpack_signs(out, N)[start:stop]
            assert torch.equal(unpack_signs(part, stop - start), signs)
    joined = Mean(LAYOUT)
    joined.load_state_dict(*(half.state_dict() for half in halves))
    assert torch.equal(joined.mean, whole.mean)
    with pytest.raises(StateError, match="load the states of all ranks"):
        Mean(LAYOUT).load_state_dict(halves[0].state_dict())
    with pytest.raises(ConfigError, match="lie in none of"):
        halves[0].vote(out, Votes.stack(parsed, 0, N), None)


def test_what_does_not_belong_together_is_refused() -> None:
    with pytest.raises(ConfigError, match="zeros is 'abstain'; the rule 'mean' needs 'coin'"):
        Server(LAYOUT, "mean", zeros="abstain")
    for wrong in ({"top": 0.1}, {"feedback": True}, {"zeros": "abstain"}):
        with pytest.raises(ConfigError, match="corrections, which the rule 'mean' needs, are dense"):
            Worker(dict.fromkeys("a", torch.zeros(3)), 0, corrects=True, **wrong)
    correction = Federation().workers[0]
    for segment in LAYOUT.segments:
        correction.parameters[segment.name].grad = torch.ones(segment.shape)
    server = Server(LAYOUT, "weighted")
    server.decide(1, {0: correction.ballot(1)})
    assert "this server accepts dense, abstain, sparse" in server.report.refused[0].message
    plain = Worker(correction.parameters, 1)
    mean = Server(LAYOUT, "mean")
    mean.decide(1, {1: plain.ballot(1)})
    assert "this server accepts correct" in mean.report.refused[0].message
    votes = Votes.stack([parse(plain.ballot(1), layout=LAYOUT, run=0)], 0, N)
    with pytest.raises(ConfigError, match="needs ballots that are corrections"):
        Mean(LAYOUT).scale(votes)


def test_no_byte_of_a_correction_can_be_changed_unnoticed() -> None:
    federation = Federation()
    decision = federation.round(1)
    ballot = federation.workers[0].ballot(2)
    for message in (decision, ballot):
        assert parse(message, layout=LAYOUT, run=0).kind is Kind.CORRECT
        assert parse(message, layout=LAYOUT, run=0).to_bytes() == message
        for at in range(len(message)):
            changed = message[:at] + bytes([message[at] ^ 0x41]) + message[at + 1 :]
            with pytest.raises(BallotError):
                parse(changed, layout=LAYOUT, run=0)
        for length in range(len(message)):
            with pytest.raises(BallotError):
                parse(message[:length], layout=LAYOUT, run=0)


@given(st.lists(st.tuples(st.integers(-126, 127), st.integers(1, 10_000)), min_size=1, max_size=9))
@settings(max_examples=200)
def test_a_scale_lies_within_what_half_of_the_weight_claims(rows: list[tuple[int, int]]) -> None:
    """So a minority of the weight cannot choose it."""
    claimed = torch.tensor([[claim] for claim, _ in rows], dtype=torch.int8)
    weights = torch.tensor([weight for _, weight in rows])
    found = int(agreed(claimed, weights))
    at_most = sum(weight for claim, weight in rows if claim <= found)
    at_least = sum(weight for claim, weight in rows if claim >= found)
    assert 2 * at_most >= weights.sum()
    assert 2 * at_least >= weights.sum()
    assert (scales(torch.tensor([found, 3, -2]), LAYOUT, 0, N)[:130] == 2.0**found).all()


# ---- engines -------------------------------------------------------------------------------------


def both_ways(case: Config, rounds: int) -> tuple[Run, Run]:
    """Runs of a case one by one and in the joint pass, which end with the same parameters."""
    one, other = (Run(case, task(), Machine(together=way)) for way in (False, True))
    for run in (one, other):
        for _ in range(rounds):
            run.step()
        run.settle()
    assert torch.equal(one.gradients.x, other.gradients.x)
    return one, other


@pytest.mark.parametrize(
    "more", [{}, {"miss": 0.3}, {"attack": "invert:1"}, {"min_voters": 3, "miss": 0.4}], ids=str
)
def test_the_joint_pass_sends_the_same_bits(more: dict[str, Any]) -> None:
    case = config("mean", 4, 10, momentum=0.9, decay=0.5, **more)
    one, other = both_ways(case, 10)
    for name in ("bytes_up", "bytes_down"):
        assert one.history[name] == other.history[name]
    beliefs = [[memory.belief for memory in run.workers.memories()] for run in (one, other)]
    for mine, its in zip(*beliefs, strict=True):
        assert (mine is None and not its.any()) or torch.equal(mine, its)


def ranks(rank: int, world: int) -> list[list[int]]:
    case = config("mean", world, 10, decay=0.5)
    ways: list[dict[str, Any]] = [{}, {"overlap": True}, {"wrapped": "never"}]
    return [Script(rank, case, **way).train(10) for way in ways]


def test_torch_distributed_equals_the_simulator(tmp_path: Path) -> None:
    wanted = simulated(config("mean", 3, 10, decay=0.5))
    for answer in together(3, ranks, folder=tmp_path):
        assert answer == [wanted] * 3


def test_the_optimizer_resumes_bit_for_bit() -> None:
    gradients = torch.randn(12, 40, generator=torch.Generator().manual_seed(3))

    def train(p: torch.nn.Parameter, optimizer: Vote, rounds: range) -> Tensor:
        for t in rounds:
            p.grad = gradients[t].clone()
            optimizer.step()
        return p.detach().clone()

    p, q = (torch.nn.Parameter(torch.zeros(40)) for _ in range(2))
    first, second = (Vote([each], rule="mean") for each in (p, q))
    train(p, first, range(6))
    state, saved = copy.deepcopy(first.state_dict()), p.detach().clone()
    wanted = train(p, first, range(6, 12))
    q.data.copy_(saved)
    second.load_state_dict(state)
    assert torch.equal(train(q, second, range(6, 12)), wanted)
