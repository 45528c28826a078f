"""The lines that the server logs, in Flower's own log."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from signvote.core.report import RoundReport
from signvote.metrics import percent

log = logging.getLogger("flwr")  # Flower's own

SHOWN = 20  # lines of a kind in a round, and workers in a line


class Lines:
    """Lines about the nodes of a round: of each kind the first ones are logged, and how many more there are."""

    def __init__(self, round: int) -> None:
        self._round = round
        self._counts = Counter[str]()

    def add(self, kind: str, text: str, *values: object, level: int = logging.WARNING) -> None:
        """Log a line about a node, if it is among the first of its kind."""
        self._counts[kind] += 1
        if self._counts[kind] <= SHOWN:
            log.log(level, "signvote: round %d: " + text, self._round, *values)

    def close(self) -> None:
        """Log how many more there are."""
        for kind, number in self._counts.items():
            if number > SHOWN:
                log.warning("signvote: round %d: %d more nodes %s", self._round, number - SHOWN, kind)


def log_round(round: int, report: RoundReport, nodes: Mapping[int, int], silent: Sequence[int]) -> None:
    """Log one line for each ballot that did not count, one for the round, and one for each notice.

    Args:
        round: the round that was decided.
        report: of the server.
        nodes: the node id of each worker.
        silent: workers that did not answer.

    """
    lines = Lines(round)
    for each in report.refused:
        who = (nodes[each.worker], each.worker)
        lines.add("are refused", "refused node %d (worker %d): %s: %s", *who, each.reason, each.message)
    for worker, reason in report.abstained.items():
        lines.add("abstain", "node %d (worker %d) abstains: %s", nodes[worker], worker, reason)
    lines.close()
    if not report.is_decided:
        log.warning("signvote: round %d: too few voted: no parameter moved", round)
    for notice in report.notices:
        log.warning("signvote: %s", notice)
    log.info(
        "signvote: round %d: %d voted, %d refused, %d abstained, %d silent%s",
        round,
        len(report.voters),
        len(report.refused),
        len(report.abstained),
        len(silent),
        f" (workers {_listed(silent)})" if silent else "",
    )


def _listed(workers: Sequence[int]) -> str:
    first = list(workers[:SHOWN])
    others = len(workers) - len(first)
    return f"{first} and {others} more" if others else f"{first}"


def log_trust(report: RoundReport, shares: Mapping[int, float], nodes: Mapping[int, int]) -> None:
    """Log a table of the voters of the last round, those with most weight first.

    Args:
        report: of the server.
        shares: voter -> its share of all weight in the round; none if the rule has no such weights.
        nodes: the node id of each worker.

    """
    if not report.voters:
        return
    voters = sorted(report.voters, key=lambda worker: -shares.get(worker, 0.0))
    log.info("signvote: whose votes counted in round %d:", report.round)
    log.info("\tworker  share of all weight  overruled in  node")
    for worker in _ends(voters):
        weight = percent(shares[worker]) if worker in shares else "by coordinate"
        overruled = percent(report.disagreement[worker])
        log.info("\t%6d  %19s  %12s  %d", worker, weight, overruled, nodes[worker])
    if len(voters) > SHOWN:
        log.info("\tand %d more in between", len(voters) - SHOWN)


def _ends(voters: Sequence[int]) -> Sequence[int]:
    """All of few, the first and the last of many."""
    if len(voters) <= SHOWN:
        return voters
    half = SHOWN // 2
    return [*voters[:half], *voters[-half:]]
