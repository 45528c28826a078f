"""The lines that the server logs, in Flower's own log."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from signvote.core.report import RoundReport

log = logging.getLogger("flwr")  # Flower's own


def log_round(round: int, report: RoundReport, nodes: Sequence[int], silent: Sequence[int]) -> None:
    """Log one line for each ballot that did not count, one for the round, and one for each notice.

    Args:
        round: the round that was decided.
        report: of the server.
        nodes: the node id of each worker.
        silent: workers that did not answer.

    """
    for refusal in report.refused:
        log.warning(
            "signvote: round %d: refused node %d (worker %d): %s: %s",
            round,
            nodes[refusal.worker],
            refusal.worker,
            refusal.reason,
            refusal.message,
        )
    for worker, reason in report.abstained.items():
        log.warning(
            "signvote: round %d: node %d (worker %d) abstains: %s",
            round,
            nodes[worker],
            worker,
            reason,
        )
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
        f" (workers {list(silent)})" if silent else "",
    )
