"""Who takes part: batch sizes, data, presence. Everything is a pure function of seed, worker and round."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from signvote.errors import ConfigError

SMALL = {1: 0, 2: 9, 3: 12, 4: 14}  # batch mode -> workers of 15 with a small batch
SMALL_BATCH = 4


def mode_batch_sizes(mode: int, workers: int = 15, total: int = 960) -> list[int]:
    """The paper's batch modes for any number of workers and samples a round; small workers first.

    >>> mode_batch_sizes(4)[-2:], sum(mode_batch_sizes(3))
    ([4, 904], 960)
    """
    if mode not in SMALL:
        raise ConfigError(f"mode is {mode}; it must be 1, 2, 3 or 4")
    if workers < 1:
        raise ConfigError(f"workers is {workers}; it must be 1 or more")
    small = min(workers - 1, round(SMALL[mode] * workers / 15))
    each, rest = divmod(total - small * SMALL_BATCH, workers - small)
    if each < 1:
        raise ConfigError(f"{total} samples a round are too few for {workers} workers in mode {mode}")
    return [SMALL_BATCH] * small + [each + (i < rest) for i in range(workers - small)]


def generator(*parts: int) -> torch.Generator:
    """A generator that depends on these numbers and nothing else."""
    entropy = [len(parts), *parts]  # the length, because trailing zeros alone do not count
    seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(seed & (2**63 - 1))


def split(labels: Tensor, workers: int, how: str, seed: int) -> list[Tensor]:
    """Which samples each worker owns.

    Args:
        labels: of the training data.
        workers: how many share it.
        seed: of the run.
        how: "shared": all have everything, as in the paper. "iid": equal random parts. "dirichlet:A":
            each label's samples dealt out by a Dirichlet(A) draw. "labels:K": K labels per worker.

    """
    kind, _, value = how.partition(":")
    if kind == "shared" and not value:
        return [torch.arange(len(labels))] * workers
    order = torch.randperm(len(labels), generator=generator(seed, 1))
    if kind == "iid" and not value:
        parts = [order[m::workers] for m in range(workers)]
    elif kind == "dirichlet":
        parts = _dealt(labels, order, _dirichlet(labels, workers, _number(how, value), seed))
    elif kind == "labels":
        parts = _dealt(labels, order, _few_labels(labels, workers, int(_number(how, value))))
    else:
        raise ConfigError(f"split is {how!r}; it must be shared, iid, dirichlet:A or labels:K")
    empty = [m for m, part in enumerate(parts) if not len(part)]
    if empty:
        raise ConfigError(
            f"split {how!r} leaves worker {empty[0]} without a sample; use fewer workers or another split"
        )
    return parts


def _number(how: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise ConfigError(f"split is {how!r}; the number after the colon must be above 0")
    return number


def _dirichlet(labels: Tensor, workers: int, alpha: float, seed: int) -> Tensor:
    """Shares (labels, workers) that each sum to 1."""
    rng = np.random.default_rng([seed, 2])
    return torch.from_numpy(rng.dirichlet([alpha] * workers, size=int(labels.max()) + 1))


def _few_labels(labels: Tensor, workers: int, k: int) -> Tensor:
    """Shares such that worker m has labels m k, m k + 1, ... in turn, shared equally by those who do."""
    kinds = int(labels.max()) + 1
    has = torch.zeros(kinds, workers, dtype=torch.float64)
    for m in range(workers):
        has[[(m * k + i) % kinds for i in range(min(k, kinds))], m] = 1
    return has / has.sum(1, keepdim=True).clamp_min(1)


def _dealt(labels: Tensor, order: Tensor, shares: Tensor) -> list[Tensor]:
    """Each label's samples, in `order`, cut by that label's shares."""
    parts: list[list[Tensor]] = [[] for _ in range(shares.shape[1])]
    for label, share in enumerate(shares):
        own = order[labels[order] == label]
        ends = (share.cumsum(0) * len(own)).round().long().tolist()
        for m, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            parts[m].append(own[start:end])
    return [torch.cat(part) for part in parts]


class Sampler:
    """Each worker's batches: its own samples in a random order, a new order for each pass over them.

    Batch t of a worker is a pure function of (seed, worker, t), so a resumed run draws what the
    uninterrupted one would.
    """

    def __init__(self, parts: Sequence[Tensor], batch_sizes: Sequence[int], seed: int) -> None:
        for m, (part, size) in enumerate(zip(parts, batch_sizes, strict=True)):
            if not 1 <= size <= len(part):
                raise ConfigError(
                    f"worker {m} has a batch size of {size}; it must lie in 1..{len(part)}, the samples it owns"
                )
        self.parts, self.batch_sizes, self.seed = parts, batch_sizes, seed
        self._order = lru_cache(maxsize=2 * len(parts))(self._shuffled)

    def batch(self, worker: int, t: int) -> Tensor:
        """Indices of the samples of a worker's batch number t, from 0."""
        size, owned = self.batch_sizes[worker], len(self.parts[worker])
        epoch, start = divmod(t * size, owned)
        indices = self._order(worker, epoch)[start : start + size]
        if len(indices) < size:
            indices = torch.cat([indices, self._order(worker, epoch + 1)[: size - len(indices)]])
        return indices

    def _shuffled(self, worker: int, epoch: int) -> Tensor:
        part = self.parts[worker]
        return part[torch.randperm(len(part), generator=generator(self.seed, 3, worker, epoch))]


def parse_absences(texts: Sequence[str], workers: int) -> list[tuple[int, int, int]]:
    """`WORKER:FROM:TO` -> (worker, from, to), both rounds included; TO may be left out: for good.

    A worker that joins late is absent from 1; one that leaves and returns, in between.
    """
    found = []
    for text in texts:
        try:
            numbers = [int(part) for part in text.split(":")]
        except ValueError:
            numbers = []
        if len(numbers) == 2:
            numbers.append(2**62)
        if len(numbers) != 3 or not 0 <= numbers[0] < workers or numbers[1] > numbers[2]:
            raise ConfigError(
                f"absent is {text!r}; wanted WORKER:FROM[:TO] with a worker in 0..{workers - 1} and FROM <= TO"
            )
        found.append((numbers[0], numbers[1], numbers[2]))
    return found


def present(
    round: int, workers: int, miss: float, absences: Sequence[tuple[int, int, int]], seed: int
) -> list[int]:
    """Who votes in a round: those not away, each of whom misses it with probability `miss`."""
    away = {worker for worker, first, last in absences if first <= round <= last}
    if miss:
        misses = torch.rand(workers, generator=generator(seed, 4, round)) < miss
        away |= {m for m in range(workers) if misses[m]}
    return [m for m in range(workers) if m not in away]
