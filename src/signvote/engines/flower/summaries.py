"""Means of the metrics that nodes report. A node may send anything: the rest is left out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import islice

from flwr.app import MetricRecord, RecordDict
from flwr.serverapp.strategy import Result

from signvote.engines.flower.logs import log
from signvote.engines.flower.records import METRICS, record_in

Metrics = dict[str, float]

MOST_METRICS = 100  # names: of one node, and of all together
LEFT_OUT = "-left-out"  # ends the name of a count of values that are not finite


class MetricMeans:
    """Means of metrics over nodes."""

    def __init__(self) -> None:
        self._has_warned = False

    def read(self, content: RecordDict, round: int) -> Metrics:
        """The metrics in a reply that are single numbers."""
        record = record_in(content, METRICS, MetricRecord)
        if len(record) > MOST_METRICS:
            self._warn(round, "a node reports %d metrics", len(record))
        first = islice(record.items(), MOST_METRICS)
        return {name: float(value) for name, value in first if isinstance(value, int | float)}

    def of(self, round: int, reported: Sequence[Metrics]) -> Metrics:
        """The mean of each metric over the nodes that report it as a finite number.

        A value that is not finite is left out; the entry `NAME-left-out` counts those of metric NAME. Of more than
        `MOST_METRICS` names, those that most nodes report are kept.
        """
        uses = Counter(name for metrics in reported for name in metrics)
        if len(uses) > MOST_METRICS:
            self._warn(round, "nodes report %d different metrics", len(uses))
        means: Metrics = {}
        left_out: Metrics = {}
        for name, nodes in uses.most_common(MOST_METRICS):
            values = [metrics[name] for metrics in reported if name in metrics]
            finite = [value for value in values if math.isfinite(value)]
            if finite:
                means[name] = sum(finite) / len(finite)
            if len(finite) < nodes:
                left_out[name + LEFT_OUT] = nodes - len(finite)
        if left_out:
            log.warning("signvote: round %d: metrics that are not finite: %s", round, left_out)
        return means | left_out

    def _warn(self, round: int, what: str, names: int) -> None:
        """Log that metrics are left out, once."""
        if not self._has_warned:
            log.warning(f"signvote: round %d: {what}; %d are kept", round, names, MOST_METRICS)
        self._has_warned = True


def shift_rounds(result: Result, done: int) -> None:
    """Count the rounds of a result from the start of training: Flower counts from this call of `start`."""
    for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
        by_round = getattr(result, name)
        setattr(result, name, {done + t: value for t, value in by_round.items()})
