"""Which of the connected nodes are asked to vote in a round."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from random import Random

from flwr.serverapp import Grid

from signvote.engines.flower.logs import log
from signvote.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """A share of the connected nodes. The names are those of Flower's FedAvg.

    Unlike FedAvg's, a round does not wait for nodes beyond its deadline, and the sample is the same in every run with
    the same nodes.
    """

    fraction_train: float = 1.0  # of the connected nodes, rounded down
    min_train_nodes: int = 1  # are asked at least, and waited for
    min_available_nodes: int = 1  # the first round after a start waits for this many connected nodes

    def __post_init__(self) -> None:
        if not 0 < self.fraction_train <= 1:
            raise ConfigError(
                f"fraction_train is {self.fraction_train}; it must lie above 0, and at most be 1"
            )
        for name in ("min_train_nodes", "min_available_nodes"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be 1 or more")

    def choose(
        self,
        grid: Grid,
        least: int,
        timeout: float,
        run: int,
        round: int,
    ) -> list[int]:
        """The nodes that are asked in a round: a sample of those that are connected.

        Args:
            grid: knows the nodes.
            least: wait for this many, or for `min_train_nodes`.
            timeout: seconds; then the round has the nodes that are there.
            run: the run's number.
            round: the sample depends on run, round and nodes alone.

        """
        connected = self.connected(grid, max(least, self.min_train_nodes), timeout)
        return self.sample(connected, run, round)

    def connected(self, grid: Grid, least: int, timeout: float) -> list[int]:
        """The nodes that are connected: at least so many, unless the time is up before."""
        deadline = time.monotonic() + timeout
        nodes = sorted(grid.get_node_ids())
        if len(nodes) < least:
            log.info("signvote: waits for nodes: %d of %d are connected", len(nodes), least)
        while len(nodes) < least and time.monotonic() < deadline:
            time.sleep(1)
            nodes = sorted(grid.get_node_ids())
        return nodes

    def sample(self, nodes: list[int], run: int, round: int) -> list[int]:
        """The nodes that are asked, sorted: a function of the nodes, the run and the round."""
        size = max(int(len(nodes) * self.fraction_train), self.min_train_nodes)
        if size >= len(nodes):
            return nodes
        chosen = Random(f"{run} {round}").sample(nodes, size)
        log.info("signvote: round %d: asks %d of %d nodes", round, size, len(nodes))
        return sorted(chosen)


class Asked:
    """The nodes that are asked to vote in a round, and until when they may answer.

    Args:
        sampling: chooses them.

    """

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.timeout = math.inf  # seconds of a round
        self.nodes: list[int] = []  # their ids
        self._is_starting = True

    def start(self, timeout: float) -> None:
        """Begin with rounds of this many seconds. The first of them waits for more nodes."""
        self.timeout = timeout
        self._is_starting = True

    def choose(self, grid: Grid, min_ballots: int, run: int, round: int) -> None:
        """Choose the nodes of a round: at least as many as must vote, unless the time is up before."""
        least = min_ballots
        if self._is_starting:
            least = max(least, self.sampling.min_available_nodes)
        self._is_starting = False
        self.nodes = self.sampling.choose(grid, max(1, least), self.timeout, run, round)

    @property
    def ttl(self) -> float | None:
        """Seconds for which messages to them are kept; None: without limit."""
        return None if math.isinf(self.timeout) else self.timeout
