"""Means of the metrics and medians of the buffers that nodes report. A node may send anything: the rest is left out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import Result
from torch import Tensor

from signvote.core.layout import Layout
from signvote.engines.flower.logs import log
from signvote.engines.flower.records import BUFFERS, METRICS, record_in

Numbers = np.ndarray[Any, np.dtype[np.float32]]
Metrics = dict[str, float]
Buffers = dict[str, Numbers]

MOST_METRICS = 100  # names: of one node, and of all together
LEFT_OUT = "-left-out"  # ends the name of a count of values that are not finite


class Reported(NamedTuple):
    """What a node sends beside its ballot."""

    metrics: Metrics
    buffers: Buffers


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


def buffers_of(model: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """The entries of a model that nodes may report: floating-point tensors that are not voted on."""
    voted = {segment.name for segment in layout.segments}
    others = {name: tensor for name, tensor in model.items() if name not in voted}
    return {name: tensor for name, tensor in others.items() if tensor.is_floating_point() and tensor.numel()}


def buffers_in(content: RecordDict, buffers: Mapping[str, Tensor]) -> Buffers:
    """The numbers of these buffers in a reply. Those of another size, or not finite, are left out."""
    found = {name: _buffer_in(content, name, buffer.numel()) for name, buffer in buffers.items()}
    return {name: values for name, values in found.items() if values is not None}


def set_buffers_(buffers: Mapping[str, Tensor], reported: Sequence[Buffers]) -> None:
    """Set each buffer that most nodes report to the median over these nodes, number by number.

    A minority of nodes cannot move a median beyond what the others report, nor change an entry that only they report,
    such as a frozen parameter.
    """
    for name, buffer in buffers.items():
        usable = [values[name] for values in reported if name in values]
        if 2 * len(usable) > len(reported):
            middle = np.median(np.stack(usable), axis=0)
            buffer.copy_(torch.from_numpy(middle).view(buffer.shape))


def _buffer_in(content: RecordDict, name: str, size: int) -> Numbers | None:
    array = record_in(content, BUFFERS, ArrayRecord).get(name)
    if array is None or len(array.data) != 4 * size:
        return None
    values = np.frombuffer(array.data, "<f4")
    return values if np.isfinite(values).all() else None


def shift_rounds(result: Result, done: int) -> None:
    """Count the rounds of a result from the start of training: Flower counts from this call of `start`."""
    for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
        by_round = getattr(result, name)
        setattr(result, name, {done + t: value for t, value in by_round.items()})
