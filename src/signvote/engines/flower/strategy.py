"""The server's side: a Flower Strategy whose rounds are votes.

A round, in order: every connected node is sent what its model lacks; whoever answers before the deadline
votes; the ballots are decided by `signvote.Server`; the model takes the step; the checkpoint is written.

Workers are numbered in the order in which their nodes first appear (within a round, by node id), and the
map is part of the checkpoint: trust belongs to a node id, yet ballots, coins and logs carry small numbers,
the same as in the simulator.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from signvote import checkpoint
from signvote.core.ballot import parse
from signvote.core.bits import SERVER, Zeros
from signvote.core.encoder import Encoding
from signvote.core.layout import Layout
from signvote.core.rule import Rule
from signvote.core.server import Server
from signvote.core.worker import apply_decision
from signvote.engines.flower.records import (
    BALLOT,
    CONFIG,
    DECISIONS,
    METRICS,
    MODEL,
    NOTHING,
    ORDER,
    applied_in,
    ballot_in,
    loss_in,
    to_array,
)
from signvote.errors import ConfigError, EngineError, LayoutError
from signvote.formats import check_state, upgraded

log = logging.getLogger("flwr")  # Flower's own

Step = float | Callable[[int], float]
VERSION = 1


class QuorumError(EngineError):
    """Too few nodes voted in a round. Nothing of it was kept; the round before is in the checkpoint."""


class SignVote(Strategy):
    """Trains by votes of packed signs: N/8 bytes up and N/8 down per node and round.

    The deadline of a round is the `timeout` of `start`; `num_rounds` counts those in the checkpoint too.
    After a round `server.report` says what happened, by worker; `nodes[worker]` is the node id.

    Args:
        layout: of the model, `Layout.of(model)`.
        rule: a name from `RULES`, or a Rule made for this layout.
        step: size of the step, or a function of the round, from 1.
        local_steps: K: each node takes K steps before it votes on the sign of what they changed.
        local_rate: learning rate of those steps.
        momentum: beta of each worker's average before the sign.
        zeros: what a zero sends and decides: "coin" or "abstain".
        run: the run's number, below 2^63; ballots of another run are refused.
        decay: weight decay.
        feedback: workers add to their next signal what the signs left unsaid.
        top: workers vote only on this share of the coordinates.
        min_nodes: the first round after a start waits for so many nodes, at most until its deadline.
        min_ballots: a round with fewer votes is an error.
        evaluate_every: rounds between two evaluations on the nodes; 0: none.
        checkpoint: file that is written after every round and read at the start if it is there.
        encoding: momentum, zeros, top and feedback as one object, instead of these.
        options: of the rule named.

    """

    def __init__(
        self,
        layout: Layout,
        rule: str | Rule = "pooled",
        *,
        step: Step = 1e-3,
        local_steps: int = 1,
        local_rate: float = 0.1,
        momentum: float = 0.0,
        zeros: Zeros = "coin",
        run: int = 0,
        decay: float = 0.0,
        feedback: bool = False,
        top: float | None = None,
        min_nodes: int = 1,
        min_ballots: int = 1,
        evaluate_every: int = 0,
        checkpoint: str | os.PathLike[str] | None = None,
        encoding: Encoding | None = None,
        **options: object,
    ) -> None:
        for name, value, least in (
            ("local_steps", local_steps, 1),
            ("min_nodes", min_nodes, 1),
            ("min_ballots", min_ballots, 1),
            ("evaluate_every", evaluate_every, 0),
        ):
            if value < least:
                raise ConfigError(f"{name} is {value}; it must be {least} or more")
        if not 0 <= run < 2**63:
            raise ConfigError(f"run is {run}; it must lie in 0..2^63-1")
        if encoding is None:
            encoding = Encoding(momentum=momentum, zeros=zeros, top=top, feedback=feedback)
        self.server = Server(layout, rule, run=run, zeros=encoding.zeros, **options)
        self.layout, self.step, self.decay = layout, step, decay
        self.min_nodes, self.min_ballots = min_nodes, min_ballots
        self.evaluate_every = evaluate_every
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self.settings: dict[str, Any] = {
            "run": run, "decay": decay, "local_steps": local_steps, "local_rate": local_rate,
            **{name: value for name, value in asdict(encoding).items() if value is not None},
        }  # fmt: skip
        self.nodes: list[int] = []  # worker -> node id
        self.applied: dict[int, int] = {}  # node id -> last round in its model, as it says
        self.decisions: dict[int, tuple[float, bytes]] = {}  # round -> step, message: the last few
        self.model: dict[str, Tensor] = {}
        self.timeout = math.inf
        self._asked: list[int] = []
        self._starting = True

    @property
    def round(self) -> int:
        """The last round decided, 0 before the first."""
        return self.server.last_round or 0

    # ---- the run ---------------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run up to round `num_rounds`, from where this object or its checkpoint is, else from the arrays given."""
        if not self.round:
            self._take(initial_arrays.to_torch_state_dict())
        if not self.round and self.checkpoint is not None and self.checkpoint.exists():
            self.load_state_dict(checkpoint.load(self.checkpoint))
            log.info("signvote: goes on after round %d of %s", self.round, self.checkpoint)
        self.timeout, self._starting = timeout, True
        done = self.round
        result = super().start(
            grid,
            self._arrays(),
            max(0, num_rounds - done),
            timeout,
            train_config,
            evaluate_config,
            evaluate_fn and (lambda t, arrays: evaluate_fn(done + t, arrays)),
        )
        result.arrays = self._arrays()
        for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
            setattr(result, name, {done + t: value for t, value in getattr(result, name).items()})
        return result

    def summary(self) -> None:
        """Log the settings."""
        log.info("\t├──> Rule: %s, %r", self.server.rule.name, self.layout)
        log.info("\t└──> Settings: %s", self.settings)

    def _take(self, model: dict[str, Tensor]) -> None:
        """Own a copy of the model; only what the layout names is voted on."""
        model = {name: tensor.clone() for name, tensor in model.items()}
        named = [(s.name, model.get(s.name)) for s in self.layout.segments]
        missing = [name for name, tensor in named if tensor is None]
        if missing or Layout((n, t) for n, t in named if t is not None) != self.layout:
            what = f"lack {', '.join(missing)}" if missing else "have other shapes"
            raise LayoutError(f"the initial arrays {what}; wanted {self.layout!r}")
        self.model = model

    def _arrays(self) -> ArrayRecord:
        return ArrayRecord(self.model)

    # ---- down ------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """A message to every connected node: what it lacks, and whom it votes as."""
        self._asked = self._wait_for_nodes(grid)
        self.nodes += [node for node in self._asked if node not in self.nodes]
        config["server-round"] = self.round + 1
        return [self._message(node, arrays, config, MessageType.TRAIN) for node in self._asked]

    def _wait_for_nodes(self, grid: Grid) -> list[int]:
        """Those connected; the first round after a start waits for more of them."""
        wanted = max(self.min_nodes, self.min_ballots) if self._starting else self.min_ballots
        self._starting = False
        end = time.monotonic() + self.timeout
        while len(nodes := sorted(grid.get_node_ids())) < wanted and time.monotonic() < end:
            time.sleep(1)
        return nodes

    def _message(self, node: int, arrays: ArrayRecord, config: ConfigRecord, kind: str) -> Message:
        content, order = RecordDict(), dict(self.settings)
        order |= {"round": self.round + 1, "worker": self.nodes.index(node), "model_round": self.round}
        lacking = self._lacking(node)
        if lacking is None:
            content[MODEL] = arrays
            lacking = {}
        elif lacking:
            content[DECISIONS] = ArrayRecord({str(t): to_array(d) for t, (_, d) in lacking.items()})
        order |= {"decided": list(lacking), "steps": [step for step, _ in lacking.values()]}
        content[ORDER], content[CONFIG] = ConfigRecord(order), config
        ttl = None if math.isinf(self.timeout) else self.timeout
        return Message(content, node, kind, group_id=str(self.round + 1), ttl=ttl)

    def _lacking(self, node: int) -> dict[int, tuple[float, bytes]] | None:
        """The decisions that a node's model lacks; None: it needs the whole model."""
        rounds = range(self.applied.get(node, self.round) + 1, self.round + 1)
        if node not in self.applied or any(t not in self.decisions for t in rounds):
            return None
        return {t: self.decisions[t] for t in rounds}

    # ---- up --------------------------------------------------------------------------------------

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Decide the round by the ballots that came."""
        t = self.round + 1
        answers = self._answers(t, replies)
        ballots = [(w, ballot_in(c)) for w, c in answers if BALLOT in c or applied_in(c) != NOTHING]
        admitted = self.server.admit(t, ballots)  # type: ignore[arg-type]  # what is no bytes is refused
        voters = {ballot.worker for ballot in admitted.voters}
        if len(voters) < self.min_ballots:
            raise QuorumError(
                f"round {t}: {len(voters)} of {len(self._asked)} nodes voted, min_ballots is {self.min_ballots};"
                f" round {t - 1} is {'in ' + str(self.checkpoint) if self.checkpoint else 'the last complete one'}"
            )
        decision = self.server.decide(t, admitted)
        self._apply(t, decision)
        self._report(t, answers)
        if self.checkpoint is not None:
            checkpoint.save(self.checkpoint, self.state_dict())
        losses = [loss for worker, c in answers if worker in voters and (loss := loss_in(c)) is not None]
        metrics: dict[str, Any] = {"ballots": len(voters), "refused": len(self.server.report.refused)}
        if losses:
            metrics["loss"] = sum(losses) / len(losses)
        return self._arrays(), MetricRecord(metrics)

    def _answers(self, t: int, replies: Iterable[Message]) -> list[tuple[int, RecordDict]]:
        """(worker, content) of those that answered; what they have applied is noted."""
        found = []
        for reply in replies:
            node = reply.metadata.src_node_id
            if node not in self._asked:
                continue  # the SuperLink's own word on a message that nobody answered in time
            if reply.has_error():
                log.warning("signvote: round %d: error from node %d: %s", t, node, reply.error.reason)
            else:
                found.append((self.nodes.index(node), reply.content))
                self._note_applied(t, node, applied_in(reply.content))
        return found

    def _note_applied(self, t: int, node: int, applied: int) -> None:
        if 0 <= applied <= self.round:
            self.applied[node] = applied
        else:
            log.info("signvote: round %d: node %d asks for the whole model", t, node)
            self.applied.pop(node, None)

    def _apply(self, t: int, decision: bytes) -> None:
        step = float(self.step(t) if callable(self.step) else self.step)
        signed = parse(decision, layout=self.layout, run=self.server.run, round=t, worker=SERVER)
        apply_decision(self.model, signed, step, self.decay)
        self.decisions[t] = step, decision
        whole = sum(tensor.nbytes for tensor in self.model.values())
        while sum(len(message) for _, message in self.decisions.values()) > whole:
            del self.decisions[min(self.decisions)]  # whoever lacks so many is better sent the model

    def _report(self, t: int, answers: list[tuple[int, RecordDict]]) -> None:
        """One line for each ballot not counted, one for the round."""
        report = self.server.report
        for refusal in report.refused:
            node, why = self.nodes[refusal.worker], (refusal.reason, refusal.message)
            log.warning(
                "signvote: round %d: refused node %d (worker %d): %s: %s", t, node, refusal.worker, *why
            )
        for worker, why_not in report.abstained.items():
            log.warning(
                "signvote: round %d: node %d (worker %d) abstains: %s", t, self.nodes[worker], worker, why_not
            )
        silent = {self.nodes.index(node) for node in self._asked} - {worker for worker, _ in answers}
        log.info(
            "signvote: round %d: %d voted, %d refused, %d abstained, %d silent%s",
            t, len(report.voters), len(report.refused), len(report.abstained), len(silent),
            f" (workers {sorted(silent)})" if silent else "",
        )  # fmt: skip

    # ---- evaluation on the nodes -----------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the nodes that have just been asked to vote, every `evaluate_every` rounds."""
        if not self.evaluate_every or self.round % self.evaluate_every:
            return []
        config["server-round"] = self.round
        return [self._message(node, arrays, config, MessageType.EVALUATE) for node in self._asked]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The plain mean of each metric over the nodes that gave it as a number."""
        values: dict[str, list[float]] = {}
        for _, content in self._answers(self.round, replies):
            for name, value in content.metric_records.get(METRICS, MetricRecord()).items():
                if isinstance(value, int | float):
                    values.setdefault(name, []).append(float(value))
        return MetricRecord({name: sum(v) / len(v) for name, v in values.items()}) if values else None

    # ---- stopping and going on -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds: the model, the server's trust, which worker is which node."""
        return {
            "kind": "flower",
            "version": VERSION,
            "model": self.model,
            "server": self.server.state_dict(),
            "nodes": self.nodes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; the nodes are sent the whole model in the next round."""
        check_state(state, kind="flower")
        state = upgraded(state, "the checkpoint", VERSION)
        self.server.load_state_dict(state["server"])
        self._take(state["model"])
        self.nodes = list(state["nodes"])
        self.applied, self.decisions = {}, {}
