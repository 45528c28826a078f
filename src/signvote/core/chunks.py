"""Votes on many coordinates, a chunk at a time: it needs little memory besides the ballots themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import starmap

from signvote.core.ballot import Ballot
from signvote.core.rule import Rule
from signvote.core.trust import Evidence, total
from signvote.core.vote import Votes, in_a_row
from signvote.kernels import WORD, Coin, Planes

STACK_BYTES = 2**22  # ballots are stacked in chunks of about this size
SAMPLE_BYTES = 2**25  # pairs of workers are counted whenever this many votes are to be compared

Judgment = tuple[Evidence, Votes | None]  # without pairs of workers, and the votes on which to compare them


def in_chunks(ballots: Sequence[Ballot], n: int) -> Iterator[tuple[slice, Votes]]:
    """The words of each chunk of n coordinates, and the votes on them."""
    words_at_once = STACK_BYTES // (8 * max(1, len(ballots)))
    size = max(1, words_at_once) * WORD
    for first in range(0, n, size):
        votes = Votes.stack(ballots, first, min(size, n - first))
        start = first // WORD
        yield slice(start, start + votes.planes.signs.shape[1]), votes


def vote(rule: Rule, decision: Planes, ballots: Sequence[Ballot], coin: Coin | None) -> Evidence:
    """Write the decision on all coordinates; the evidence."""
    chunks = (
        (decision.map(lambda plane: plane[words]), votes)  # noqa: B023
        for words, votes in in_chunks(ballots, rule.layout.size)
    )
    return vote_in_chunks(rule, chunks, coin)


def vote_in_chunks(rule: Rule, chunks: Iterable[tuple[Planes, Votes]], coin: Coin | None) -> Evidence:
    """Decide chunk by chunk, and add the evidence up.

    Args:
        rule: decides.
        chunks: for each chunk, the planes for its decision, and its votes; at least one chunk.
        coin: of the server and round.

    """
    cast = ((out, votes, None if coin is None else coin.after(votes.first)) for out, votes in chunks)
    if not rule.splits:
        return total(starmap(rule.vote, cast))
    judged = ((rule.decide(out, votes, tosses), rule.sampled(votes)) for out, votes, tosses in cast)
    return compared_in_batches(rule, judged)


def judgments(rule: Rule, judged: Planes, ballots: Sequence[Ballot]) -> Iterator[Judgment]:
    """The evidence of each chunk, without pairs of workers, and the votes on the sample: see `Rule.judge`."""
    for words, votes in in_chunks(ballots, rule.layout.size):
        signs = judged.map(lambda plane: plane[words])  # noqa: B023
        yield rule.judge(signs, votes), rule.sampled(votes)


def evidence_of(rule: Rule, judged: Planes, ballots: Sequence[Ballot]) -> Evidence:
    """The evidence of ballots, given what they are compared with."""
    return compared_in_batches(rule, judgments(rule, judged, ballots))


def compared_in_batches(rule: Rule, judged: Iterable[Judgment]) -> Evidence:
    """The evidence of all chunks, with pairs of workers: counted for many chunks at once, as each makes a matrix."""
    thinned = ((seen, rule.thinned(sampled)) for seen, sampled in judged)
    batches = _batches(thinned)
    return total(starmap(rule.compared, batches))


def _batches(judged: Iterable[Judgment]) -> Iterator[Judgment]:
    """Judgments of successive chunks as one, until their samples have SAMPLE_BYTES or end inside a word."""
    batch: list[Judgment] = []
    size = 0
    for seen, sampled in judged:
        if sampled is None:
            yield seen, None
            continue
        batch.append((seen, sampled))
        size += sampled.planes.signs.nbytes
        if size >= SAMPLE_BYTES or sampled.n % WORD:
            yield _as_one(batch)
            batch = []
            size = 0
    if batch:
        yield _as_one(batch)


def _as_one(batch: Sequence[Judgment]) -> Judgment:
    seen, samples = zip(*batch, strict=True)
    return total(seen), in_a_row(samples)
