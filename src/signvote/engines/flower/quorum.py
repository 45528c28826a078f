"""The error of a round in which too few nodes voted."""

from __future__ import annotations

from typing import NamedTuple

from signvote.core.rounds import Round
from signvote.errors import EngineError

SHOWN = 4  # reasons in an error, at most


class QuorumError(EngineError):
    """Too few nodes voted in a round. The round changed nothing; the checkpoint holds the round before."""


class Call(NamedTuple):
    """Who was called to vote."""

    nodes: int
    silent: int  # of them
    timeout: float  # seconds
    min_ballots: int


def no_quorum(opened: Round, call: Call, kept: str) -> QuorumError:
    """What is known about the nodes that did not vote, and where the last complete round is kept."""
    t = opened.number
    known = [f"{call.silent} did not answer within {call.timeout:g} s"]
    for worker, why in opened.abstained.items():
        known.append(f"worker {worker} abstained: {why}")
    for refusal in opened.refused:
        known.append(f"refused: {refusal.message}")
    shown = "; ".join(known[:SHOWN])
    return QuorumError(
        f"round {t}: {opened.votes} of {call.nodes} nodes voted, min_ballots is {call.min_ballots}"
        f" ({shown}); round {t - 1} is {kept}"
    )
