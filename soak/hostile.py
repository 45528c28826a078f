"""Hostile ballots: each is a good ballot with one lie, under a checksum that fits."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.test_ballot import field, signed
from torch import nn

from signvote import Layout, Server, Worker
from soak import wire
from soak.driver import Episode, Stage
from soak.states import equal

HONEST = 4
HOSTILE = 3  # workers that never send a good ballot
ROUNDS = 40
MESSAGES = 10  # of hostile workers, in a round
VERSION, KIND, RESERVED, RUN, LAYOUT, WORKER, ROUND, COUNT = 4, 5, 7, 8, 16, 32, 40, 48  # bytes of the header

Lie = Callable[[bytes, random.Random], bytes]


def number(offset: int) -> Lie:
    """Another number in a field of eight bytes."""

    def lie(ballot: bytes, chance: random.Random) -> bytes:
        old = int.from_bytes(ballot[offset : offset + 8], "little")
        others = {0, 1, old ^ 1, old ^ 2**20, 2**31, 2**40, 2**63, 2**64 - 1} - {old}
        return field(ballot, offset, "<Q", chance.choice(sorted(others)))

    return lie


def byte(offset: int) -> Lie:
    """A value in a field of one byte that does not exist."""
    return lambda ballot, chance: field(ballot, offset, "B", chance.randrange(3, 256))


def other_length(ballot: bytes, chance: random.Random) -> bytes:
    size = chance.choice((0, 1, 63, 64, len(ballot) - 1, len(ballot) + 1, 10 * len(ballot)))
    resized = (ballot + bytes(size))[:size]
    return signed(resized) if size >= 64 else resized


def late(ballot: bytes, chance: random.Random) -> bytes:
    now = int.from_bytes(ballot[ROUND : ROUND + 8], "little")
    return field(ballot, ROUND, "<Q", chance.randrange(now))


def future(ballot: bytes, chance: random.Random) -> bytes:
    now = int.from_bytes(ballot[ROUND : ROUND + 8], "little")
    return field(ballot, ROUND, "<Q", now + chance.choice((1, 2, 2**40)))


def flipped(ballot: bytes, chance: random.Random) -> bytes:
    """A bit of the body, and the old checksum."""
    at = chance.randrange(64, len(ballot))
    return ballot[:at] + bytes([ballot[at] ^ 1 << chance.randrange(8)]) + ballot[at + 1 :]


def other_model(ballot: bytes, chance: random.Random) -> bytes:
    worker, round = (int.from_bytes(ballot[at : at + 8], "little") for at in (WORKER, ROUND))
    model = nn.Linear(chance.randrange(1, 50), 1)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    return Worker(model, worker).ballot(round)


LIES: dict[str, list[Lie]] = {  # the reason that a server must give
    "length": [other_length],
    "magic": [lambda ballot, chance: signed(chance.randbytes(4) + ballot[4:])],
    "version": [byte(VERSION)],
    "kind": [byte(KIND), byte(RESERVED)],
    "run": [number(RUN)],
    "layout": [number(LAYOUT), other_model],
    "worker": [number(WORKER)],
    "late": [late],
    "future": [future],
    "count": [number(COUNT)],
    "checksum": [flipped],
}


def hostile_ballots(stage: Stage) -> Episode:
    """Decisions, weights and counters are those of a server that only the honest write to."""
    chance = stage.chance
    rule = chance.choice(("majority", "weighted", "it-signsgd", "robust"))
    models = [wire.fresh() for _ in range(HONEST + HOSTILE)]
    voters = [Worker(model, m, momentum=0.9) for m, model in enumerate(models)]
    attacked, alone = (Server(Layout.of(models[0]), rule) for _ in range(2))
    faults = survived = 0
    for t in range(1, ROUNDS + 1):
        ballots = {}
        for m, voter in enumerate(voters):
            wire.backward(models[m], m, t)
            ballots[m] = voter.ballot(t)
        honest = {m: ballots[m] for m in range(HONEST)}
        lies = [lie(ballots, chance) for _ in range(MESSAGES)]
        again = [(m, ballots[(m + 1) % HONEST], "duplicate") for m in range(HONEST) if chance.random() < 0.2]
        sent = chance.sample([*honest.items(), *((m, message) for m, message, _ in lies)], HONEST + MESSAGES)
        decision = attacked.decide(t, [*sent, *((m, message) for m, message, _ in again)])
        assert decision == alone.decide(t, honest), "hostile ballots changed a decision"
        given = sorted((refusal.worker, refusal.reason) for refusal in attacked.report.refused)
        wanted = sorted((m, reason) for m, _, reason in [*lies, *again])
        faults += len(wanted)
        survived += len(wanted) if given == wanted else 0
        for voter in voters:
            voter.apply(decision, wire.STEP)
    assert equal(attacked.state_dict()["rule"], alone.state_dict()["rule"]), (
        "hostile ballots changed the trust"
    )
    return Episode(injected=faults, survived=survived, lost=0)


def lie(ballots: dict[int, bytes], chance: random.Random) -> tuple[int, bytes, str]:
    """A worker, what it sends, and the reason to refuse it: its own ballot with a lie, or somebody else's."""
    worker = HONEST + chance.randrange(HOSTILE)
    if chance.random() < 0.1:
        return worker, ballots[chance.randrange(HONEST)], "worker"
    reason = chance.choice(list(LIES))
    message = chance.choice(LIES[reason])(ballots[worker], chance)
    return worker, message, reason
