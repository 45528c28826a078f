"""The workers of a run: batch sizes, data, presence. Everything is a pure function of seed, worker and round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from signvote.errors import ConfigError
from signvote.tasks import Samples

SMALL = {
    1: 0,
    2: 9,
    3: 12,
    4: 14,
}  # batch mode -> how many of 15 workers have a small batch
SMALL_BATCH = 4
FOREVER = 2**62  # a round that no run reaches
MAX_SEED = 2**63 - 1

Absence = tuple[int, int, int]  # worker, first round, last round


def mode_batch_sizes(mode: int, workers: int = 15, total: int = 960) -> list[int]:
    """The batch sizes of one of the paper's modes, scaled to any number of workers and samples per round.

    Workers with small batches come first.

    >>> mode_batch_sizes(4)[-2:], sum(mode_batch_sizes(3))
    ([4, 904], 960)
    """
    if mode not in SMALL:
        raise ConfigError(f"mode is {mode}; it must be 1, 2, 3 or 4")
    if workers < 1:
        raise ConfigError(f"workers is {workers}; it must be 1 or more")
    scaled = round(SMALL[mode] * workers / 15)
    small = min(scaled, workers - 1)
    large = workers - small
    samples = total - small * SMALL_BATCH
    each, rest = divmod(samples, large)
    if each < 1:
        raise ConfigError(f"{total} samples a round are too few for {workers} workers in mode {mode}")
    small_batches = [SMALL_BATCH] * small
    large_batches = [each + (i < rest) for i in range(large)]
    return small_batches + large_batches


def generator(*parts: int) -> torch.Generator:
    """A generator that depends on these numbers and nothing else."""
    entropy = [len(parts), *parts]  # the length, because SeedSequence ignores trailing zeros
    sequence = np.random.SeedSequence(entropy)
    state = sequence.generate_state(1, np.uint64)
    seed = int(state[0]) & MAX_SEED
    return torch.Generator().manual_seed(seed)


@contextmanager
def seeded(device: torch.device, *parts: int) -> Iterator[None]:
    """For a while, seed torch's own random numbers, such as dropout's, by these numbers.

    Without a GPU only the CPU's: `torch.manual_seed` notes the seed for every kind of device, which takes longer than a
    small layer.
    """
    cuda = [device] if device.type == "cuda" else []
    seed_all = torch.manual_seed if cuda else torch.default_generator.manual_seed
    with torch.random.fork_rng(devices=cuda):
        seed_all(generator(*parts).initial_seed())
        yield


def split(samples: Samples, workers: int, how: str, seed: int) -> list[Tensor]:
    """The samples that each worker owns.

    Args:
        samples: the training data.
        workers: number of workers.
        seed: seed of the run.
        how: "shared": every worker owns all data, as in the paper. "iid": equal random parts. "dirichlet:A":
            a Dirichlet(A) draw divides the samples of each label. "labels:K": K labels per worker.

    """
    kind, _, value = how.partition(":")
    if kind == "shared" and not value:
        everything = torch.arange(len(samples))
        return [everything] * workers
    draws = generator(seed, 1)
    shuffled = torch.randperm(len(samples), generator=draws)
    if kind == "iid" and not value:
        parts = [shuffled[m::workers] for m in range(workers)]
    elif kind == "dirichlet":
        alpha = _number(how, value)
        labels = _classes(samples, how)
        shares = _dirichlet(labels, workers, alpha, seed)
        parts = _divided(labels, shuffled, shares)
    elif kind == "labels":
        labels = _classes(samples, how)
        k = _label_count(how, value, labels)
        shares = _few_labels(labels, workers, k)
        parts = _divided(labels, shuffled, shares)
    else:
        raise ConfigError(f"split is {how!r}; it must be shared, iid, dirichlet:A or labels:K")
    for m, part in enumerate(parts):
        if not len(part):
            raise ConfigError(
                f"split {how!r} leaves worker {m} without a sample; use fewer workers or another split"
            )
    return parts


def _classes(samples: Samples, how: str) -> Tensor:
    classes = samples.classes
    if classes is None:
        raise ConfigError(
            f"split is {how!r}; it needs class labels, integers of shape (n,), and the task has none: use shared or iid"
        )
    return classes


def _number(how: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise ConfigError(f"split is {how!r}; the number after the colon must be above 0")
    return number


def _label_count(how: str, value: str, labels: Tensor) -> int:
    """K of `labels:K`."""
    kinds = int(labels.max()) + 1
    number = _number(how, value)
    if number > kinds or number != int(number):
        raise ConfigError(f"split is {how!r}; K must be an integer in 1..{kinds}, the labels of the task")
    return int(number)


def _dirichlet(labels: Tensor, workers: int, alpha: float, seed: int) -> Tensor:
    """Shares (labels, workers): each row sums to 1."""
    rng = np.random.default_rng([seed, 2])
    kinds = int(labels.max()) + 1
    shares = rng.dirichlet([alpha] * workers, size=kinds)
    return torch.from_numpy(shares)


def _few_labels(labels: Tensor, workers: int, k: int) -> Tensor:
    """Shares (labels, workers): worker m has labels m k, m k + 1, ..., and equal shares with other owners."""
    kinds = int(labels.max()) + 1
    owns = torch.zeros(kinds, workers, dtype=torch.float64)
    for m in range(workers):
        for i in range(k):
            label = (m * k + i) % kinds
            owns[label, m] = 1
    owners = owns.sum(1, keepdim=True)
    return owns / owners.clamp_min(1)


def _divided(labels: Tensor, shuffled: Tensor, shares: Tensor) -> list[Tensor]:
    """The samples of each worker: the shuffled samples of each label, cut by the shares of that label."""
    workers = shares.shape[1]
    parts: list[list[Tensor]] = [[] for _ in range(workers)]
    shuffled_labels = labels[shuffled]
    for label, share in enumerate(shares):
        samples = shuffled[shuffled_labels == label]
        ends = share.cumsum(0) * len(samples)
        ends = ends.round().long()
        start = 0
        for part, end in zip(parts, ends.tolist(), strict=True):
            part.append(samples[start:end])
            start = end
    return [torch.cat(part) for part in parts]


class Sampler:
    """The batches of each worker: its own samples, shuffled again for each epoch.

    A worker that owns fewer samples than its batch size has some of them twice or more in a batch.

    Batch t of a worker is a pure function of (seed, worker, t), so a resumed run draws the same batches as an
    uninterrupted one.
    """

    def __init__(self, parts: Sequence[Tensor], batch_sizes: Sequence[int], seed: int) -> None:
        lengths = {id(part): len(part) for part in parts}  # shared data are one part for all
        samples = sum(lengths.values())
        for m, size in enumerate(batch_sizes):
            if not 1 <= size <= samples:
                raise ConfigError(
                    f"worker {m} has a batch size of {size}; it must lie in 1..{samples}, the training samples"
                )
        self.parts = parts
        self.batch_sizes = batch_sizes
        self.seed = seed
        cache = lru_cache(maxsize=2 * len(parts))
        self._epoch = cache(self._shuffled)

    def batch(self, worker: int, t: int) -> Tensor:
        """Indices of the samples in a worker's batch number t, counted from 0."""
        missing = self.batch_sizes[worker]
        epoch, start = divmod(t * missing, len(self.parts[worker]))
        drawn = []
        while missing:
            shuffled = self._epoch(worker, epoch)
            following = shuffled[start : start + missing]
            drawn.append(following)
            missing -= len(following)
            epoch += 1
            start = 0
        return torch.cat(drawn)

    def _shuffled(self, worker: int, epoch: int) -> Tensor:
        part = self.parts[worker]
        draws = generator(self.seed, 3, worker, epoch)
        shuffled = torch.randperm(len(part), generator=draws)
        return part[shuffled]


def parse_absences(texts: Sequence[str], workers: int) -> list[Absence]:
    """Read each `WORKER:FROM[:TO]` as (worker, from, to). Both rounds are included.

    Without TO, the worker does not return. A worker that joins late is absent from round 1.
    """
    return [_parse_absence(text, workers) for text in texts]


def _parse_absence(text: str, workers: int) -> Absence:
    wrong = ConfigError(
        f"absent is {text!r}; wanted WORKER:FROM[:TO] with a worker in 0..{workers - 1} and FROM <= TO"
    )
    try:
        numbers = [int(part) for part in text.split(":")]
        worker, first, *rest = numbers
    except ValueError:
        raise wrong from None
    last = rest[0] if rest else FOREVER
    if len(rest) > 1 or first > last:
        raise wrong
    if not 0 <= worker < workers:
        raise wrong
    return worker, first, last


def present(
    round: int,
    workers: int,
    miss: float,
    absences: Sequence[Absence],
    seed: int,
) -> list[int]:
    """The workers that vote in a round: not absent, and each misses it with probability `miss`."""
    away = {worker for worker, first, last in absences if first <= round <= last}
    if miss:
        draws = generator(seed, 4, round)
        misses = torch.rand(workers, generator=draws) < miss
        away |= {m for m in range(workers) if misses[m]}
    return [m for m in range(workers) if m not in away]
