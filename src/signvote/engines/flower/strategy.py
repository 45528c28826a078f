"""The server's side: a Flower Strategy whose rounds are votes.

A round, in order: the server sends every connected node the decisions that its model lacks; the nodes that answer
before the deadline vote; `signvote.Server` decides; the server applies the step to its model and writes the checkpoint.
`progress.py` keeps track of the nodes.
"""

from __future__ import annotations

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
from signvote.core.report import Admitted
from signvote.core.rule import Rule
from signvote.core.server import Server
from signvote.core.worker import apply_decision
from signvote.engines.flower.logs import log, log_round
from signvote.engines.flower.progress import Decision, Progress
from signvote.engines.flower.records import (
    CONFIG,
    DECISIONS,
    INSTRUCTION,
    MODEL,
    applied_in,
    ballot_in,
    is_vote,
    to_array,
)
from signvote.engines.flower.summaries import LEFT_OUT, MetricMeans, buffers_of, set_buffers_, shift_rounds
from signvote.errors import ConfigError, EngineError, LayoutError
from signvote.formats import check_state, upgraded

Step = float | Callable[[int], float]
VERSION = 1
SHOWN = 4  # reasons in an error, at most


class QuorumError(EngineError):
    """Too few nodes voted in a round. The round changed nothing; the checkpoint holds the round before."""


class SignVote(Strategy):
    """Trains by votes of packed signs: N/8 bytes up and N/8 down per node and round.

    The deadline of a round is the `timeout` of `start`. `num_rounds` includes the rounds in the checkpoint.
    After a round `server.report` shows what happened, by worker; `nodes[worker]` is the node id.

    Args:
        layout: of the model, `Layout.of(model)`.
        rule: a name from `RULES`, or a Rule made for this layout.
        step: size of the step, or a function of the round, from 1.
        local_steps: K: each node makes K local steps, and votes on the sign of the change.
        local_rate: learning rate of the local steps.
        momentum: beta of each worker's average before the sign.
        zeros: what a zero sends and decides: "coin" or "abstain".
        run: the run's number, below 2^63; ballots of another run are refused.
        decay: weight decay.
        feedback: workers add the residual, the part that the signs left out, to their next signal.
        top: workers vote only on this share of the coordinates.
        min_nodes: the first round after a start waits for this many nodes, at most until its deadline.
        min_ballots: a round with fewer votes is an error; 0: never.
        min_voters: a round with fewer votes moves nothing, and training continues.
        evaluate_every: rounds between two evaluations on the nodes; 0: none.
        buffers_every: rounds between two reports of the nodes' floating-point buffers, of which the model gets the
            median. The last round of `start` has one, too. 0: none; the model keeps the buffers of the initial arrays.
        checkpoint: a file, written after every round; `start` resumes from it if it exists.
        encoding: momentum, zeros, top and feedback as one object, instead of these.
        options: keyword arguments of the named rule.

    """

    def __init__(
        self,
        layout: Layout,
        rule: str | Rule = "weighted",
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
        min_voters: int = 1,
        evaluate_every: int = 0,
        buffers_every: int = 1,
        checkpoint: str | os.PathLike[str] | None = None,
        encoding: Encoding | None = None,
        **options: Any,
    ) -> None:
        _check_least("local_steps", local_steps, 1)
        _check_least("min_nodes", min_nodes, 1)
        _check_least("min_ballots", min_ballots, 0)
        _check_least("evaluate_every", evaluate_every, 0)
        _check_least("buffers_every", buffers_every, 0)
        if not 0 <= run < 2**63:
            raise ConfigError(f"run is {run}; it must lie in 0..2^63-1")
        if encoding is None:
            encoding = Encoding(momentum=momentum, zeros=zeros, top=top, feedback=feedback)
        self.server = Server(layout, rule, run=run, zeros=encoding.zeros, min_voters=min_voters, **options)
        encoding = encoding.suiting(self.server.rule)
        self.step = step
        self.decay = decay
        self.min_nodes = min_nodes
        self.min_ballots = min_ballots
        self.evaluate_every = evaluate_every
        self.buffers_every = buffers_every
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        chosen = {name: value for name, value in asdict(encoding).items() if value is not None}
        self.settings: dict[str, Any] = {
            "run": run,
            "decay": decay,
            "local_steps": local_steps,
            "local_rate": local_rate,
            **chosen,
        }
        self.model: dict[str, Tensor] = {}
        self.progress = Progress()
        self.timeout = math.inf
        self._means = MetricMeans()
        self._final_round = 0  # of this call of `start`
        self._asks_buffers = False
        self._asked: list[int] = []  # node ids of this round
        self._is_starting = True

    @property
    def layout(self) -> Layout:
        """The layout of the model."""
        return self.server.layout

    @property
    def nodes(self) -> list[int]:
        """The node id of each worker."""
        return self.progress.nodes

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
        """Train up to round `num_rounds`: resume from this object or its checkpoint, else start from the arrays."""
        if not self.round:
            self._load_model(initial_arrays.to_torch_state_dict())
        if not self.round and self.checkpoint is not None and self.checkpoint.exists():
            self.load_state_dict(checkpoint.load(self.checkpoint))
            log.info("signvote: continues after round %d of %s", self.round, self.checkpoint)
        self.timeout = timeout
        self._final_round = num_rounds
        self._is_starting = True
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
        shift_rounds(result, done)
        return result

    def summary(self) -> None:
        """Log the settings."""
        log.info("\t├──> Rule: %s, %r", self.server.rule.name, self.layout)
        log.info("\t└──> Settings: %s", self.settings)

    def _load_model(self, model: dict[str, Tensor]) -> None:
        """Copy the model. Workers vote only on the tensors that the layout names."""
        model = {name: tensor.clone() for name, tensor in model.items()}
        names = [segment.name for segment in self.layout.segments]
        found = {name: model[name] for name in names if name in model}
        missing = [name for name in names if name not in model]
        if missing:
            raise LayoutError(f"the initial arrays lack {', '.join(missing)}; wanted {self.layout!r}")
        if Layout(found.items()) != self.layout:
            raise LayoutError(f"the initial arrays have other shapes; wanted {self.layout!r}")
        self.model = model

    def _arrays(self) -> ArrayRecord:
        return ArrayRecord(self.model)

    # ---- down ------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """A message to every connected node: its worker number, and the decisions that it lacks."""
        self._asked = self._wait_for_nodes(grid)
        self._asks_buffers = self._wants_buffers(self.round + 1)
        self.progress.register(self._asked)
        config["server-round"] = self.round + 1
        return [self._message(node, arrays, config, MessageType.TRAIN) for node in self._asked]

    def _wait_for_nodes(self, grid: Grid) -> list[int]:
        """The connected nodes. The first round after a start waits for `min_nodes` of them."""
        wanted = self.min_ballots
        if self._is_starting:
            wanted = max(self.min_nodes, self.min_ballots)
        self._is_starting = False
        deadline = time.monotonic() + self.timeout
        nodes = sorted(grid.get_node_ids())
        while len(nodes) < wanted and time.monotonic() < deadline:
            time.sleep(1)
            nodes = sorted(grid.get_node_ids())
        return nodes

    def _message(self, node: int, arrays: ArrayRecord, config: ConfigRecord, kind: str) -> Message:
        content = RecordDict()
        decisions = self.progress.lacking(node, self.round)
        if decisions is None:
            content[MODEL] = arrays
            decisions = {}
        elif decisions:
            packed = {str(t): to_array(decision.message) for t, decision in decisions.items()}
            content[DECISIONS] = ArrayRecord(packed)
        instruction = {
            **self.settings,
            "round": self.round + 1,
            "worker": self.progress.worker(node),
            "model_round": self.round,
            "decided": list(decisions),
            "steps": [decision.step for decision in decisions.values()],
            "buffers": self._asks_buffers,
        }
        content[INSTRUCTION] = ConfigRecord(instruction)
        content[CONFIG] = config
        return Message(
            content,
            node,
            kind,
            group_id=str(self.round + 1),
            ttl=None if math.isinf(self.timeout) else self.timeout,
        )

    def _wants_buffers(self, t: int) -> bool:
        """Whether nodes report their buffers in round t."""
        if not self.buffers_every or not buffers_of(self.model, self.layout):
            return False
        return t % self.buffers_every == 0 or t == self._final_round

    # ---- up --------------------------------------------------------------------------------------

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Decide the round by the ballots that arrived."""
        t = self.round + 1
        answers = self._answers(t, replies)
        ballots = [(worker, ballot_in(content)) for worker, content in answers if is_vote(content)]
        admitted = self.server.admit(t, ballots)  # type: ignore[arg-type]  # a ballot of None is refused
        voters = {ballot.worker for ballot in admitted.voters}
        if len(voters) < self.min_ballots:
            raise self._no_quorum(t, admitted, len(answers))
        decision = self.server.decide(t, admitted)
        self._apply(t, decision)
        counted = [content for worker, content in answers if worker in voters]
        if self._asks_buffers and self.server.report.is_decided:
            set_buffers_(buffers_of(self.model, self.layout), counted)
        log_round(t, self.server.report, self.nodes, self._silent(answers))
        if self.checkpoint is not None:
            checkpoint.save(self.checkpoint, self.state_dict())
        means = self._means.of(t, counted)
        summary: dict[str, Any] = {
            "ballots": len(voters),
            "refused": len(self.server.report.refused),
            "decided": int(self.server.report.is_decided),
            **{name: means[name] for name in ("loss", "loss" + LEFT_OUT) if name in means},
        }
        return self._arrays(), MetricRecord(summary)

    def _no_quorum(self, t: int, admitted: Admitted, answers: int) -> QuorumError:
        """What is known about the nodes that did not vote, and where the last complete round is."""
        nodes = len(self._asked)
        known = [f"{nodes - answers} did not answer within {self.timeout:g} s"]
        known += [f"worker {worker} abstained: {why}" for worker, why in admitted.abstained.items()]
        known += [f"refused: {refusal.message}" for refusal in admitted.refused]
        shown = "; ".join(known[:SHOWN])
        kept = f"in {self.checkpoint}" if self.checkpoint else "the last complete one"
        return QuorumError(
            f"round {t}: {len(admitted.voters)} of {nodes} nodes voted, min_ballots is {self.min_ballots}"
            f" ({shown}); round {t - 1} is {kept}"
        )

    def _answers(self, t: int, replies: Iterable[Message]) -> list[tuple[int, RecordDict]]:
        """(worker, content) of the nodes that answered. Records the last round in each node's model."""
        asked = set(self._asked)
        answers = []
        for reply in replies:
            node = reply.metadata.src_node_id
            if node not in asked:
                continue  # the SuperLink reports a message that was not answered in time
            if reply.has_error():
                log.warning("signvote: round %d: error from node %d: %s", t, node, reply.error.reason)
                continue
            answers.append((self.progress.worker(node), reply.content))
            self._note_applied(t, node, applied_in(reply.content))
        return answers

    def _note_applied(self, t: int, node: int, applied: int) -> None:
        if 0 <= applied <= self.round:
            self.progress.set_applied(node, applied)
        else:
            log.info("signvote: round %d: node %d asks for the whole model", t, node)
            self.progress.forget_applied(node)

    def _apply(self, t: int, message: bytes) -> None:
        step = float(self.step(t) if callable(self.step) else self.step)
        decision = parse(message, layout=self.layout, run=self.server.run, round=t, worker=SERVER)
        apply_decision(self.model, decision, step, self.decay)
        model_bytes = sum(tensor.nbytes for tensor in self.model.values())
        self.progress.add(t, Decision(step, message), limit_bytes=model_bytes)

    def _silent(self, answers: list[tuple[int, RecordDict]]) -> list[int]:
        """The workers that were asked and did not answer."""
        asked = {self.progress.worker(node) for node in self._asked}
        answered = {worker for worker, _ in answers}
        return sorted(asked - answered)

    # ---- evaluation on the nodes -----------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Every `evaluate_every` rounds, ask the nodes that were asked to vote in this round."""
        if not self.evaluate_every or self.round % self.evaluate_every:
            return []
        config["server-round"] = self.round
        return [self._message(node, arrays, config, MessageType.EVALUATE) for node in self._asked]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The plain mean of each metric over the nodes that report it as a finite number."""
        answers = self._answers(self.round, replies)
        means = self._means.of(self.round, [content for _, content in answers])
        return MetricRecord(means) if means else None  # type: ignore[arg-type]  # a dict is invariant

    # ---- stopping and resuming -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The content of a checkpoint: the model, the server's trust, the node id of each worker."""
        return {
            "kind": "flower",
            "version": VERSION,
            "model": self.model,
            "server": self.server.state_dict(),
            "nodes": self.nodes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state. The next round sends every node the whole model."""
        check_state(state, kind="flower")
        state = upgraded(state, "the checkpoint", VERSION)
        self.server.load_state_dict(state["server"])
        self._load_model(state["model"])
        self.progress = Progress(state["nodes"])


def _check_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} is {value}; it must be {least} or more")
