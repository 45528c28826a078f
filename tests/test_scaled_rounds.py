"""Scaled votes: rounds, states and errors; the codes of scales."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from signvote import BallotError, ConfigError, Encoding, Server, StateError, Worker
from signvote.core.ballot import parse
from signvote.core.bits import unpack_signs
from signvote.core.header import Kind
from signvote.core.outer import Outer
from signvote.core.scaled import MOST
from signvote.core.scales import CODES, NOTHING, coded, lengths, mantissas, values
from signvote.core.vote import Votes, empty_decision
from signvote.kernels import Coin
from tests.federation import (
    LAYOUT,
    SHAPES,
    Federation,
    M,
    N,
    decided,
    each_rule,
    powers_of_votes,
    put,
    q_of,
    rule_of,
    scaled,
    stacked_votes,
)

# ---- rounds --------------------------------------------------------------------------------------


def test_a_ballot_is_a_bit_a_coordinate_and_a_byte_a_tensor() -> None:
    there = Federation()
    ballots = there.ballots()
    decision = there.server.decide(there.t, ballots)
    assert {len(message) for message in ballots.values()} == {64 + -(-N // 8) + len(SHAPES)}
    assert len(decision) == 64 + -(-N // 8) + 2 * len(SHAPES) + 8 * M
    assert parse(decision, layout=LAYOUT, run=0).kind is Kind.SCALED


def test_a_retry_sends_the_same_bytes_also_after_a_crash() -> None:
    there = Federation()
    there.round()
    message = there.ballots()[2]
    worker = there.workers[2]
    assert worker.ballot(there.t) == message
    again = Worker(there.params[2], 2, scales=True, batch_size=4)
    again.load_state_dict(copy.deepcopy(worker.state_dict()))
    assert again.ballot(there.t) == message
    decision = there.server.decide(there.t, {0: there.workers[0].ballot(there.t)})
    before = again.encoder.memory.residual
    again.apply(decision, 1.0)  # it was not counted
    assert before is not None
    assert again.encoder.memory.residual is not None
    assert not torch.equal(again.encoder.memory.residual, before)


def test_too_few_voters_move_nothing_and_keep_their_changes() -> None:
    there = Federation("majority", server={"min_voters": 3})
    there.round()
    x = there.x.clone()
    server_left = rule_of(there.server).residual.values.clone()
    before = there.residuals()
    changed = there.changed.clone()
    there.round(absent=(0, 1, 2))
    assert torch.equal(there.x, x)
    assert torch.equal(rule_of(there.server).residual.values, server_left)
    added = there.changed - changed
    torch.testing.assert_close(there.residuals(), before + added, atol=1e-7, rtol=0)


def test_a_change_that_is_not_finite_abstains_and_keeps_the_residual() -> None:
    there = Federation()
    there.round()
    ballots = there.ballots(absent=(1,))
    before = there.residuals()[1]
    put(there.params[1], torch.full((N,), torch.nan))
    ballots[1] = there.workers[1].ballot(there.t)
    decision = there.server.decide(there.t, ballots)
    there.workers[1].apply(decision, 1.0)
    assert there.server.report.abstained == {1: "non-finite gradient"}
    assert torch.equal(there.residuals()[1], before)


@each_rule
def test_a_server_resumes_bit_for_bit(rule: str) -> None:
    there = Federation(rule)
    for _ in range(3):
        there.round()
    resumed = Server(LAYOUT, scaled(rule))
    resumed.load_state_dict(copy.deepcopy(there.server.state_dict()))
    for _ in range(3):
        ballots = there.ballots()
        assert resumed.decide(there.t, ballots) == there.server.decide(there.t, ballots)


def test_parts_resume_as_one_and_one_as_parts() -> None:
    there = Federation()
    there.round()
    one = rule_of(there.server)
    parts = [scaled(), scaled()]
    for part, span in zip(parts, [(0, 128), (128, N)], strict=True):
        part.own([span])
        part.load_state_dict(one.state_dict())
    again = scaled()
    again.load_state_dict(parts[0].state_dict(), parts[1].state_dict())
    assert torch.equal(again.residual.values, one.residual.values)
    with pytest.raises(StateError, match="in no state given"):
        again.load_state_dict(parts[0].state_dict())


def test_a_round_that_is_repeated_counts_once() -> None:
    """As after a rank that died between the vote and the evidence."""
    votes = stacked_votes(Federation())
    once, twice = scaled(), scaled()
    _, evidence = decided(once, votes)
    decided(twice, votes)
    _planes, again = decided(twice, votes)
    once.learn(evidence)
    twice.learn(again)
    assert torch.equal(once.residual.values, twice.residual.values)


def test_absent_rows_do_not_vote() -> None:
    votes = stacked_votes(Federation())
    present = torch.tensor([True, False, True, True, False])
    rows = [0, 2, 3]
    assert votes.claims is not None
    some = Votes(
        workers=tuple(rows),
        batch_sizes=tuple(votes.batch_sizes[row] for row in rows),
        planes=votes.planes.map(lambda plane: plane[rows]),
        n=N,
        claims=votes.claims[rows],
    )
    wanted, _evidence = decided(scaled(), some)
    absent = Votes(
        workers=votes.workers, batch_sizes=votes.batch_sizes, planes=votes.planes, n=N, claims=votes.claims,
        present=present,
    )  # fmt: skip
    server = Server(LAYOUT, scaled())
    found = server.decide_planes(1, absent)
    assert server.report.voters == (0, 2, 3)
    assert torch.equal(unpack_signs(found, N), unpack_signs(wanted, N)) or (q_of(some, "weighted") == 0).any()
    nobody = Votes(
        workers=votes.workers, planes=votes.planes, n=N, claims=votes.claims, present=torch.zeros(M) > 0
    )
    before = rule_of(server).residual.values.clone()
    nothing = server.decide_planes(2, nobody)
    assert not server.report.is_decided
    assert not unpack_signs(nothing, N).any()
    assert torch.equal(rule_of(server).residual.values, before)


def test_a_worker_that_missed_a_vote_continues() -> None:
    there = Federation(momentum=0.6)
    for t in range(6):
        there.round(absent=(1,) if t in (2, 3) else ())
    assert there.x.abs().sum() > 0


def test_forgotten_workers_and_shares() -> None:
    there = Federation()
    there.round()
    chosen = rule_of(there.server)
    there.server.forget(3)
    assert chosen.trust is not None
    assert 3 not in chosen.trust.workers
    assert chosen.shares((0, 1)) is None
    chosen.vote(empty_decision(N, Coin(1)), stacked_votes(there), Coin(1))
    shares = chosen.shares((0, 1, 2, 3, 4))
    assert shares is not None
    assert float(shares.sum()) == pytest.approx(1)


# ---- scales --------------------------------------------------------------------------------------


def test_every_code_is_the_code_of_its_value() -> None:
    codes = torch.arange(-128, 128).to(torch.int8)
    found = values(codes)
    assert torch.equal(coded(found), codes)
    assert found[0] == 0
    assert bool((found[1:] > found[:-1]).all())
    mantissa, exponents = mantissas(codes)
    assert torch.equal(found.double(), mantissa.double() * 2.0**exponents)


@given(st.floats(1e-14, 5e4))
def test_a_code_is_within_an_eighth(number: float) -> None:
    found = float(values(coded(torch.tensor(number, dtype=torch.float64))))
    assert abs(found - number) <= number / 8


def test_numbers_beyond_the_codes_get_the_nearest() -> None:
    assert coded(torch.tensor([1e-30, 1e30])).tolist() == list(CODES)
    assert lengths(LAYOUT).tolist() == [130, 1, 70, 100]


def test_all_scales_of_zero_leave_the_residual_of_the_server() -> None:
    votes = stacked_votes(Federation())
    assert votes.claims is not None
    silent = Votes(
        workers=votes.workers, planes=votes.planes, n=N, claims=torch.full_like(votes.claims, NOTHING)
    )
    chosen = scaled()
    _planes, evidence = decided(chosen, silent)
    chosen.learn(evidence)
    assert (chosen.decided == NOTHING).all()
    assert not chosen.residual.values.any()


def test_weights_too_large_for_a_tally_are_halved() -> None:
    codes = torch.zeros(400, 1, dtype=torch.int8)
    power = powers_of_votes(codes, torch.full((400, 1), 10_240))
    assert int(power.weights.long().sum()) < 2**31
    few = powers_of_votes(codes[:4], torch.full((4, 1), 10_240))
    one = few.unit * few.weights[0]
    assert float(power.unit[0] * power.weights[0, 0]) * 100 == pytest.approx(float(one))


def test_magnitudes_have_a_bound() -> None:
    votes = stacked_votes(Federation())
    chosen = scaled()
    chosen.residual.values += 1e30
    _, evidence = decided(chosen, votes)
    assert evidence.magnitudes is not None
    assert evidence.magnitudes.tolist() == [130 * MOST, 0, 70 * MOST, 100 * MOST]


# ---- errors --------------------------------------------------------------------------------------


def test_rules_without_a_weight_for_each_worker_are_refused() -> None:
    for rule in ("it-signsgd", "mean"):
        with pytest.raises(ConfigError, match="need a rule with a weight for each worker"):
            scaled(rule)


def test_other_ballots_are_refused() -> None:
    server = Server(LAYOUT, scaled())
    params = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    plain = Worker(params, 0)
    server.decide(1, {0: plain.ballot(1)})
    assert [refusal.message for refusal in server.report.refused] == [
        "dense ballot; this server accepts scaled"
    ]
    there = Federation()
    usual = Server(LAYOUT, "weighted")
    usual.decide(1, there.ballots())
    assert {refusal.reason for refusal in usual.report.refused} == {"kind"}


def test_a_damaged_scaled_ballot_is_refused() -> None:
    message = bytearray(Federation().ballots()[0])
    message[-1] ^= 1
    with pytest.raises(BallotError, match="checksum"):
        parse(bytes(message), layout=LAYOUT, run=0)
    with pytest.raises(BallotError, match="wanted"):
        parse(bytes(message[:-1]), layout=LAYOUT, run=0)


def test_settings_that_do_not_go_with_scales() -> None:
    with pytest.raises(ConfigError, match=r"use Encoding\(scales=True\)"):
        Encoding(scales=True, momentum=0.9)
    with pytest.raises(ConfigError, match="needs 'coin'"):
        Server(LAYOUT, scaled(), zeros="abstain")
    params = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    with pytest.raises(ConfigError, match="the optimizer of the local steps decays: use 0"):
        Worker(params, 0, scales=True, decay=0.1)
    votes = stacked_votes(Federation())
    plain = Votes(workers=votes.workers, planes=votes.planes, n=N)
    with pytest.raises(ConfigError, match="need ballots with scales"):
        decided(scaled(), plain)


@pytest.mark.parametrize(
    ("how", "message"), [({"step": 0.0}, "outer step is 0"), ({"momentum": 1.0}, "outer momentum is 1")]
)
def test_an_outer_step_has_a_range(how: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Outer(**how)


def test_states_of_something_else_are_refused() -> None:
    outer = Outer()
    outer.move_(torch.zeros(3), torch.ones(3))
    with pytest.raises(StateError, match="outer momentum has 3 numbers; the parameters have 4"):
        Outer().load_state_dict(outer.state_dict(), torch.zeros(4))
    with pytest.raises(StateError, match="state of weighs"):
        scaled("majority").load_state_dict(scaled("weighted").state_dict())


def test_the_outer_step_is_that_of_sgd_with_nesterov() -> None:
    x, parameter = torch.ones(50), torch.nn.Parameter(torch.ones(50))
    outer = Outer(step=0.7, momentum=0.6)
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.6, nesterov=True)
    for t in range(5):
        direction = torch.randn(50, generator=torch.Generator().manual_seed(t))
        outer.move_(x, direction)
        parameter.grad = direction
        sgd.step()
    torch.testing.assert_close(x, parameter.detach())
    again = Outer(step=0.7, momentum=0.6)
    again.load_state_dict(outer.state_dict(), x)
    assert again.average is not None
    assert outer.average is not None
    assert torch.equal(again.average, outer.average)
