"""The attackers of a run: which workers attack, by which attack, and from which round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from signvote.core.vote import Votes, everywhere
from signvote.errors import ConfigError
from signvote.kernels import Planes, words_for
from signvote.names import check_name
from signvote.sim.attacks import ATTACKS, Scene


@dataclass(frozen=True)
class Hostility:
    """The attackers of a run: which workers attack, how, and from which round."""

    name: str
    first: int  # the first attacker; all workers after it attack too
    start: int
    strength: float

    def change(self, votes: Votes, *, seed: int, round: int, last: Planes | None) -> Votes:
        """The votes that are sent, from honest votes sorted by worker."""
        honest = [worker for worker in votes.workers if worker < self.first]
        attackers = len(votes.workers) - len(honest)
        if round < self.start or not attackers:
            return votes
        scene = Scene(
            honest=len(honest),
            seed=seed,
            round=round,
            strength=self.strength,
            last=last,
        )
        attack = ATTACKS[self.name]
        return attack.act(votes, scene)

    def relabels(self, worker: int, round: int) -> bool:
        """Whether a worker trains on wrong labels in a round."""
        attacks = worker >= self.first and round >= self.start
        return attacks and self.name == "label-flip"


def stacked(
    planes: Sequence[Planes | None],
    workers: Sequence[int],
    n: int,
    batch_sizes: Sequence[int],
) -> Votes:
    """The votes of single workers as one object; None: the worker takes no part."""
    present = [p is not None for p in planes]
    devices = [p.signs.device for p in planes if p is not None]
    device = devices[0] if devices else torch.device("cpu")
    empty = torch.zeros(words_for(n), dtype=torch.int64, device=device)
    absent = Planes(empty, None)
    rows = [absent if p is None else p for p in planes]
    return Votes(
        workers=tuple(workers),
        planes=_joined(rows, n),
        n=n,
        batch_sizes=tuple(batch_sizes[m] for m in workers),
        present=torch.tensor(present, device=device),
    )


def _joined(rows: list[Planes], n: int) -> Planes:
    """The planes of several workers as rows of one; support only if a worker has one."""
    signs = torch.stack([row.signs for row in rows])
    supports = [row.support for row in rows]
    if all(support is None for support in supports):
        return Planes(signs, None)
    full = everywhere(n, signs.device)
    filled = [full if support is None else support for support in supports]
    return Planes(signs, torch.stack(filled))


def parse_attack(text: str | None, workers: int) -> Hostility | None:
    """Read `NAME[=STRENGTH]:COUNT[:START]`. The last COUNT workers attack: in modes 2 to 4 the strongest."""
    if text is None:
        return None
    head, *numbers = text.split(":")
    name, equals, given = head.partition("=")
    check_name("attack", name, ATTACKS)
    attack = ATTACKS[name]
    if equals and attack.strength is None:
        raise ConfigError(f"attack is {text!r}; {name} has no strength")
    wrong = ConfigError(
        f"attack is {text!r}; wanted NAME[=STRENGTH]:COUNT[:START]"
        f" with COUNT in 0..{workers}, STRENGTH in [0, {attack.most:g}]"
    )
    try:
        count, start = _count_and_start(numbers)
        strength = float(given) if equals else attack.strength or 0.0
    except ValueError:
        raise wrong from None
    if not 0 <= count <= workers or not 0 <= strength <= attack.most:
        raise wrong
    if name == "sleeper" and len(numbers) < 2:
        raise ConfigError(f"attack is {text!r}; a sleeper needs START, the round it wakes up in: {text}:100")
    return Hostility(name, workers - count, start, strength)


def _count_and_start(numbers: Sequence[str]) -> tuple[int, int]:
    """COUNT and START, which defaults to round 1; ValueError if there are too few or too many."""
    if len(numbers) == 1:
        return int(numbers[0]), 1
    count, start = numbers
    return int(count), int(start)
