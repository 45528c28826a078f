"""How the messages of several servers of a tree become one: see `relay.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from signvote.core.messages import Declared, Partial, Roll, Shown, Weights
from signvote.core.report import Refusal
from signvote.core.rule import Rule
from signvote.core.tally import Tally
from signvote.core.trust import Evidence, numbered
from signvote.core.vote import Votes, everywhere
from signvote.core.wire import Topic
from signvote.errors import BallotError, ConfigError
from signvote.kernels import Planes

Messages = Sequence[bytes | None]  # one for each relay below, in the same order throughout a round
T = TypeVar("T")


def check_splits(rule: Rule) -> None:
    """Raise unless relays may share the workers of a rule."""
    if not rule.splits:
        raise ConfigError(f"the rule {rule.name!r} cannot be split among relays: it does not vote in steps")


def contents(messages: Messages, read: Callable[[bytes], T], faults: list[str]) -> list[T | None]:
    """The contents of messages; None where none arrived, or a damaged one."""
    found: list[T | None] = []
    for message in messages:
        try:
            found.append(None if message is None else read(message))
        except BallotError as error:
            faults.append(str(error))
            found.append(None)
    return found


def joined(rolls: Sequence[Roll | None], round: int) -> tuple[Roll, dict[int, int]]:
    """One roll of several, and the number of the roll that each voter is in.

    Of two ballots by one worker the first counts.
    """
    sources: dict[int, int] = {}
    declared: dict[int, Declared] = {}
    abstained: dict[int, str] = {}
    refused: list[Refusal] = []
    for source, roll in enumerate(rolls):
        if roll is None:
            continue
        refused += roll.refused
        for worker in (*roll.declared, *roll.abstained):
            if worker in declared or worker in abstained:
                text = f"worker {worker} has already voted in round {round}"
                refused.append(Refusal(worker=worker, reason="duplicate", message=text))
            elif worker in roll.abstained:
                abstained[worker] = roll.abstained[worker]
            else:
                declared[worker] = roll.declared[worker]
                sources[worker] = source
    whole = Roll(
        declared=dict(sorted(declared.items())),
        abstained=dict(sorted(abstained.items())),
        refused=tuple(refused),
    )
    return whole, sources


def split(weights: Weights, sources: dict[int, int], parts: int) -> list[Weights]:
    """The weights for each of the rolls that were joined."""
    return [_those_of(weights, sources, source) for source in range(parts)]


def _those_of(weights: Weights, sources: dict[int, int], source: int) -> Weights:
    rows = [row for row, worker in enumerate(weights.workers) if sources.get(worker) == source]
    return Weights(
        workers=tuple(weights.workers[row] for row in rows),
        weights=None if weights.weights is None else weights.weights[rows],
    )


def added(sums: Sequence[Partial | None], topic: Topic, rule: Rule) -> Partial:
    """One tally of several."""
    total = Tally(**topic._asdict(), groups=len(rule.groups))
    arrived = [each for each in sums if each is not None]
    for each in arrived:
        total.merge(each.tally)
    return Partial(workers=tuple(sorted(w for each in arrived for w in each.workers)), tally=total)


def together(parts: Sequence[Shown | None], groups: int, workers: Sequence[int] | None = None) -> Shown:
    """The evidence about the workers of all parts, sorted; of those named only, and nothing where there is none."""
    known = [part for part in parts if part is not None and part.evidence.workers]
    ids = [worker for part in known for worker in part.evidence.workers]
    wanted = sorted(ids) if workers is None else list(workers)
    at = numbered(ids)
    rows = [at.get(worker, len(ids)) for worker in wanted]
    none = torch.zeros(1, groups, dtype=torch.int64)
    mismatches = torch.cat([*(part.evidence.mismatches for part in known), none])
    cast = torch.cat([*(part.evidence.cast for part in known), none])
    evidence = Evidence(workers=tuple(wanted), mismatches=mismatches[rows], cast=cast[rows])
    samples = [part.sampled for part in known if part.sampled is not None]
    if not samples:
        return Shown(evidence=evidence, sampled=None)
    return Shown(evidence=evidence, sampled=_stacked(samples, rows, evidence.workers))


def _stacked(samples: Sequence[Votes], rows: Sequence[int], workers: tuple[int, ...]) -> Votes:
    """Votes of different workers on the same coordinates; a row beyond the last is of a worker without votes."""
    n = samples[0].n
    whole = everywhere(n)
    supports = []
    for each in samples:
        support = each.planes.support
        supports.append(whole.expand_as(each.planes.signs) if support is None else support)
    none = torch.zeros_like(whole)[None]
    signs = torch.cat([*(each.planes.signs for each in samples), none])[list(rows)]
    support = torch.cat([*supports, none])[list(rows)]
    is_dense = bool((support == whole).all())
    return Votes(workers=workers, planes=Planes(signs, None if is_dense else support), n=n)
