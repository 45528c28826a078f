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
    rows = []
    workers = []
    for row, worker in enumerate(weights.workers):
        if sources.get(worker) == source:
            rows.append(row)
            workers.append(worker)
    theirs = None if weights.weights is None else weights.weights[rows]
    return Weights(workers=tuple(workers), weights=theirs)


def added(sums: Sequence[Partial | None], topic: Topic, rule: Rule) -> Partial:
    """One tally of several."""
    total = Tally(**topic._asdict(), groups=len(rule.groups))
    workers: list[int] = []
    for each in sums:
        if each is not None:
            total.merge(each.tally)
            workers += each.workers
    return Partial(workers=tuple(sorted(workers)), tally=total)


def together(parts: Sequence[Shown | None], groups: int, workers: Sequence[int] | None = None) -> Shown:
    """The evidence about the workers of all parts, sorted; of those named only, and nothing where there is none."""
    known = [part for part in parts if part is not None and part.evidence.workers]
    all_evidence = [part.evidence for part in known]
    ids = [worker for each in all_evidence for worker in each.workers]
    wanted = sorted(ids) if workers is None else list(workers)
    at = numbered(ids)
    beyond = len(ids)  # the row of nothing
    rows = [at.get(worker, beyond) for worker in wanted]
    nothing = torch.zeros(1, groups, dtype=torch.int64)
    mismatches = [each.mismatches for each in all_evidence]
    cast = [each.cast for each in all_evidence]
    evidence = Evidence(
        workers=tuple(wanted),
        mismatches=torch.cat([*mismatches, nothing])[rows],
        cast=torch.cat([*cast, nothing])[rows],
    )
    samples = [part.sampled for part in known if part.sampled is not None]
    sampled = _stacked(samples, rows, evidence.workers) if samples else None
    return Shown(evidence=evidence, sampled=sampled)


def _stacked(samples: Sequence[Votes], rows: Sequence[int], workers: tuple[int, ...]) -> Votes:
    """Votes of different workers on the same coordinates; a row beyond the last is of a worker without votes."""
    n = samples[0].n
    whole = everywhere(n)
    all_signs = []
    all_support = []
    for each in samples:
        signs, support = each.planes
        all_signs.append(signs)
        all_support.append(whole.expand_as(signs) if support is None else support)
    places = list(rows)
    nothing = torch.zeros_like(whole)[None]
    stacked = torch.cat([*all_signs, nothing])[places]
    voted = torch.cat([*all_support, nothing])[places]
    is_dense = bool((voted == whole).all())
    planes = Planes(stacked, None if is_dense else voted)
    return Votes(workers=workers, planes=planes, n=n)
