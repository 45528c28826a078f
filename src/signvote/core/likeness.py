"""Do the workers have the same kind of data? Votes on a few coordinates, over 100 rounds, tell.

Noise is new in every round. What a worker wants because of its own data, it wants in all of them. So where data are
unlike, the votes of a worker in 50 rounds agree with its own in the next 50, but not with those of others. With h_m the
mean of some votes of worker m in the first half, and g_m in the second:

    C[m, k] = mean of g_m h_k          excess of m = C[m, m] - mean of C[m, k] over k != m

A vote may be old: where no gradient comes, the sign of the momentum stays. So only those coordinates of a worker count
whose votes changed twice at least. docs/unlike-data.md has what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from signvote.core.ballot import Ballot
from signvote.core.bits import Bytes
from signvote.core.trust import State, numbered_once
from signvote.core.vote import Votes
from signvote.errors import StateError
from signvote.kernels import WORD, download

EVERY: Final = 10  # rounds between two looks at votes, so that momentum has forgotten the one before
LOOKS: Final = 10  # at the votes of a worker
WORDS: Final = 16  # 1,024 coordinates, spread over the model; a smaller model is not looked at
MOST: Final = 100  # workers that are looked at
FEWEST: Final = 3  # that must have voted
CHANGES: Final = 2  # of the votes on a coordinate, without which they may be old
ENOUGH: Final = 50  # coordinates that changed; a worker with fewer shows nothing
UNLIKE: Final = 0.12  # the median excess from which on data are taken for unlike

Signs = dict[int, Tensor]  # worker -> (coordinates,) int8, 0 where it did not vote


@dataclass
class Seen:
    """The votes of a worker so far, all (coordinates,) int8."""

    looks: int
    last: Tensor  # other than 0
    changes: Tensor
    halves: Tensor  # (2, coordinates): sums over the first and over the second half of the looks

    def add(self, signs: Tensor) -> None:
        """Look at the votes of a round, if they are still needed."""
        if self.looks == LOOKS:
            return
        self.changes += signs * self.last == -1
        self.last = torch.where(signs == 0, self.last, signs)
        self.halves[2 * self.looks // LOOKS] += signs
        self.looks += 1

    def tensor(self) -> Tensor:
        """All votes in one tensor, (4, coordinates)."""
        return torch.stack([self.last, self.changes, *self.halves])

    @classmethod
    def of(cls, looks: int, tensor: Tensor) -> Seen:
        """Votes as they were saved."""
        last, changes, *_ = tensor
        return cls(looks, last.clone(), changes.clone(), tensor[2:].clone())


NOTHING: Final = torch.zeros(4, WORDS * WORD, dtype=torch.int8)


class Likeness:
    """Looks at some votes in every tenth round."""

    def __init__(self) -> None:
        self.rounds = 0  # that were decided
        self._seen: dict[int, Seen] = {}

    @property
    def wants_signs(self) -> bool:
        """Whether to look at the votes of the next round."""
        return self.rounds % EVERY == EVERY - 1

    def observe(self, signs: Signs | None) -> bool:
        """Count a round, and look at some of its votes; whether data are seen to be unlike."""
        self.rounds += 1
        for worker, its in (signs or {}).items():
            if worker in self._seen or len(self._seen) < MOST:
                self._seen.setdefault(worker, Seen.of(0, NOTHING)).add(its)
        if self.rounds % (EVERY * LOOKS):
            return False
        seen = {worker: its for worker, its in self._seen.items() if its.looks == LOOKS}
        self.forget(*seen)
        return len(seen) >= FEWEST and excess(list(seen.values())) >= UNLIKE

    def forget(self, *workers: int) -> None:
        """Drop what was seen of these workers."""
        for worker in workers:
            self._seen.pop(worker, None)

    def state_dict(self) -> State:
        """Everything needed to resume."""
        seen = [NOTHING, *(its.tensor() for its in self._seen.values())]
        return {
            "rounds": self.rounds,
            "workers": list(self._seen),
            "looks": [its.looks for its in self._seen.values()],
            "votes": torch.stack(seen)[1:],
        }

    def load_state_dict(self, state: State) -> None:
        """Resume from a state."""
        workers = numbered_once(state["workers"])
        looks = state["looks"]
        votes = state["votes"]
        wanted = (len(workers), *NOTHING.shape)
        if votes.shape != wanted or not all(0 <= n <= LOOKS for n in looks):
            raise StateError("the state's votes are not those of some coordinates")
        rows = zip(looks, votes.to(torch.int8), strict=True)
        seen = [Seen.of(n, its) for n, its in rows]
        self.rounds = state["rounds"]
        self._seen = dict(zip(workers, seen, strict=True))


def excess(seen: Sequence[Seen]) -> float:
    """The median of the workers' excess, see above."""
    halves = torch.stack([its.halves for its in seen])
    first, second = halves.double().unbind(1)
    alive = torch.stack([its.changes >= CHANGES for its in seen]).double()
    count = alive.sum(1)
    coordinates = count.clamp_min(1)[:, None]
    products = (second * alive) @ first.T
    means = products / coordinates / (LOOKS / 2) ** 2
    own = means.diag()
    of_others = means.sum(1) - own
    others = of_others / (len(seen) - 1)
    found = torch.where(count >= ENOUGH, own - others, 0.0)
    return float(found.median())


# ---- some of the votes of a round --------------------------------------------------------------------


def signs_of_ballots(ballots: Sequence[Ballot], n: int) -> Signs:
    """Some of the votes in these ballots; nothing of a small model."""
    if n < WORDS * WORD:
        return {}
    first_bytes = 8 * _words(n)
    at = (first_bytes[:, None] + np.arange(8)).reshape(-1)
    found = {}
    for ballot in ballots[:MOST]:
        support = None if ballot.support is None else ballot.support[at]
        found[ballot.worker] = _signs(ballot.signs[at], support)
    return found


def signs_of_votes(votes: Votes) -> Callable[[], Signs]:
    """Some of these votes, which may be on a device: they are waited for when the result is called."""
    if votes.n < WORDS * WORD:
        return dict
    at = torch.from_numpy(_words(votes.n)).to(votes.device)
    planes = [plane[:MOST, at] for plane in votes.planes if plane is not None]
    present = votes.present
    if present is None:
        present = torch.ones(len(votes.workers), dtype=torch.bool)
    arrive = download(present, *planes)

    def arrived() -> Signs:
        voted, *found = arrive()
        packed = [plane.contiguous().numpy().view(np.uint8) for plane in found]
        signs = {}
        for row, worker in enumerate(votes.workers[:MOST]):
            if voted[row]:
                signs[worker] = _signs(*(plane[row] for plane in packed))
        return signs

    return arrived


def _words(n: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Words that are spread evenly over n coordinates."""
    return np.arange(WORDS) * (n // WORD) // WORDS


def _signs(packed: Bytes, support: Bytes | None = None) -> Tensor:
    signs = 2 * np.unpackbits(packed).astype(np.int8) - 1
    if support is not None:
        signs *= np.unpackbits(support).astype(np.int8)
    return torch.from_numpy(signs)
