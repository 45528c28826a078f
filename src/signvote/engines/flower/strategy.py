"""The server's side: a Flower Strategy whose rounds are votes.

A round, in order: the server sends the nodes of a sample the decisions that their models lack; as replies arrive, their
ballots are counted; at the deadline `signvote.Server` decides; the server applies the step to its model and writes the
checkpoint. `progress.py` keeps track of the nodes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from signvote import checkpoint
from signvote.core.ballot import parse
from signvote.core.bits import SERVER, Zeros
from signvote.core.encoding import Encoding
from signvote.core.groups import Factors
from signvote.core.layout import Layout
from signvote.core.rounds import Round, Store
from signvote.core.rule import Rule
from signvote.core.server import Server
from signvote.engines.flower.answers import Answers
from signvote.engines.flower.arrivals import Arrivals
from signvote.engines.flower.buffers import Buffers, Reporting, buffers_in, set_buffers_
from signvote.engines.flower.logs import log, log_round, log_trust
from signvote.engines.flower.model import ServerModel, Step
from signvote.engines.flower.progress import Decision, Progress
from signvote.engines.flower.quorum import Call, no_quorum
from signvote.engines.flower.records import as_lists, ballot_in, is_vote
from signvote.engines.flower.requests import Requests
from signvote.engines.flower.sampling import Asked, Sampling
from signvote.engines.flower.summaries import LEFT_OUT, MetricMeans, Metrics, shift_rounds
from signvote.errors import ConfigError
from signvote.formats import check_state, upgraded

VERSION = 2
NODES = 100_000  # are known, about, unless told


class Reported(NamedTuple):
    """What a node sends beside its ballot."""

    metrics: Metrics
    buffers: Buffers


class SignVote(Strategy):
    """Trains by votes of packed signs: N/8 bytes up and N/8 down per node and round.

    The deadline of a round is the `timeout` of `start`. `num_rounds` includes the rounds in the checkpoint.
    After a round `server.report` shows what happened, by worker, and `shares` whose vote counted how much, if the rule
    has one weight for each worker; `nodes[worker]` is the node id.

    Args:
        layout: of the model, `Layout.of(model)`.
        rule: a name from `RULES`, or a Rule made for this layout.
        step: size of the step, or a function of the round, from 1.
        local_steps: K: each node makes K local steps, and votes on the sign of the change.
        local_rate: learning rate of the local steps.
        momentum: beta of each worker's average before the sign.
        interpolation: send the signs of Lion's interpolation, see `Worker`; None: of the average.
        clip: workers scale gradients down to this norm before momentum averages them; None: never.
        polar: of each matrix, the signs of the average's polar factor are sent: for language models.
        zeros: what a zero sends and decides: "coin" or "abstain".
        run: the run's number, below 2^63; ballots of another run are refused.
        decay: weight decay.
        factors: what the step and the decay of a parameter are multiplied by, by name; see `signvote.factors`.
        feedback: workers add the residual, the part that the signs left out, to their next signal.
        top: workers vote only on this share of the coordinates.
        fraction_train: the share of the connected nodes that is asked to vote in a round.
        min_train_nodes: a round asks at least this many nodes, and waits for them, at most until its deadline.
        min_available_nodes: the first round after a start waits for this many nodes, at most until its deadline.
        min_ballots: a round with fewer votes is an error; 0: never.
        min_voters: a round with fewer votes moves nothing, and training continues.
        evaluate_every: rounds between two evaluations on the nodes; 0: none.
        buffers_every: rounds between two reports of the nodes' floating-point buffers, of which the model gets the
            median. The last round of `start` has one, too. 0: none; the model keeps the buffers of the initial arrays.
        remember: about how many nodes are known, with their trust; those not asked for longest are forgotten first.
            None: 100,000, and trust in as many as the rule can afford.
        store: where the ballots of a round are kept, `Spool(...)`; None: in memory.
        checkpoint: a file, written after every round; `start` resumes from it if it exists.
        encoding: all settings of the encoder as one object, instead of these.
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
        interpolation: float | None = None,
        clip: float | None = None,
        polar: bool = False,
        zeros: Zeros = "coin",
        run: int = 0,
        decay: float = 0.0,
        factors: Mapping[str, Factors] | None = None,
        feedback: bool = False,
        top: float | None = None,
        fraction_train: float = 1.0,
        min_train_nodes: int = 1,
        min_available_nodes: int = 1,
        min_ballots: int = 1,
        min_voters: int = 1,
        evaluate_every: int = 0,
        buffers_every: int = 1,
        remember: int | None = None,
        store: Store | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        encoding: Encoding | None = None,
        **options: Any,
    ) -> None:
        _check_least(1, local_steps=local_steps)
        _check_least(
            0,
            min_ballots=min_ballots,
            evaluate_every=evaluate_every,
            buffers_every=buffers_every,
        )
        if not 0 <= run < 2**63:
            raise ConfigError(f"run is {run}; it must lie in 0..2^63-1")
        if encoding is None:
            averaging: dict[str, Any] = {
                "momentum": momentum,
                "interpolation": interpolation,
                "clip": clip,
                "polar": polar,
            }
            encoding = Encoding(
                **averaging,
                zeros=zeros,
                top=top,
                feedback=feedback,
            )
        self.server = Server(
            layout,
            rule,
            run=run,
            zeros=encoding.zeros,
            min_voters=min_voters,
            remember=remember,
            store=store,
            **options,
        )
        encoding = encoding.suiting(self.server.rule)
        self._model = ServerModel(layout, step=step, decay=decay, factors=factors)
        sampling = Sampling(
            fraction_train=fraction_train,
            min_train_nodes=min_train_nodes,
            min_available_nodes=min_available_nodes,
        )
        self._asked = Asked(sampling)
        self._reporting = Reporting(buffers_every)
        self._means = MetricMeans()
        self.min_ballots = min_ballots
        self.evaluate_every = evaluate_every
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        chosen = {name: value for name, value in asdict(encoding).items() if value is not None}
        self.settings: dict[str, Any] = {
            "run": run,
            "decay": decay,
            "local_steps": local_steps,
            "local_rate": local_rate,
            **chosen,
            **as_lists(self._model.factors),
        }
        self.progress = Progress(remember or max(NODES, self.server.remember))
        self.shares: dict[int, float] = {}  # voter -> its share of all weight in the last round

    @property
    def model(self) -> dict[str, Tensor]:
        """The tensors of the model after the last round."""
        return self._model.tensors

    @property
    def layout(self) -> Layout:
        """The layout of the model."""
        return self.server.layout

    @property
    def nodes(self) -> dict[int, int]:
        """The node id of each worker that is not forgotten."""
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
            self._model.load(initial_arrays.to_torch_state_dict())
        if not self.round and self.checkpoint is not None and self.checkpoint.exists():
            self.load_state_dict(checkpoint.load(self.checkpoint))
            log.info("signvote: continues after round %d of %s", self.round, self.checkpoint)
        self._asked.start(timeout)
        self._reporting.final_round = num_rounds
        done = self.round
        result = super().start(
            Arrivals(grid),  # type: ignore[arg-type]  # a grid in all that matters here
            self._model.arrays(),
            max(0, num_rounds - done),
            timeout,
            train_config,
            evaluate_config,
            evaluate_fn and (lambda t, arrays: evaluate_fn(done + t, arrays)),
        )
        log_trust(self.server.report, self.shares, self.nodes)
        result.arrays = self._model.arrays()
        shift_rounds(result, done)
        return result

    def summary(self) -> None:
        """Log the settings."""
        log.info("\t├──> Rule: %s, %r", self.server.rule.name, self.layout)
        log.info("\t└──> Settings: %s", self.settings)

    # ---- down ------------------------------------------------------------------------------------

    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """A message to each node that is asked: its worker number, and the decisions that it lacks."""
        next_round = self.round + 1
        self._asked.choose(grid, self.min_ballots, self.server.run, next_round)
        self._reporting.ask(next_round, self._model.buffers)
        gone = self.progress.register(self._asked.nodes)
        if gone:
            self.server.forget(*gone)
        config["server-round"] = next_round
        return self._messages(arrays, config, MessageType.TRAIN)

    def _messages(self, arrays: ArrayRecord, config: ConfigRecord, kind: str) -> Iterator[Message]:
        """Made one by one, as they are sent."""
        requests = Requests(
            progress=self.progress,
            round=self.round,
            model=arrays,
            config=config,
            settings={**self.settings, "buffers": self._reporting.is_asked},
            ttl=self._asked.ttl,
        )
        return (requests.to(node, kind) for node in self._asked.nodes)

    # ---- up --------------------------------------------------------------------------------------

    def aggregate_train(
        self,
        server_round: int,
        replies: Iterable[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Count the ballots as they arrive, and decide the round."""
        t = self.round + 1
        opened = self.server.open(t)
        answers = Answers(self.progress, self._asked.nodes, self.round)
        reported = self._counted(opened, answers.read(replies, t))
        if opened.votes < self.min_ballots:
            kept = f"in {self.checkpoint}" if self.checkpoint else "the last complete one"
            asked = Call(len(self._asked.nodes), len(answers.silent), self._asked.timeout, self.min_ballots)
            raise no_quorum(opened, asked, kept)
        voters = [ballot.worker for ballot in opened.voters]
        self._apply(t, opened.close())
        shares = self.server.rule.shares(voters)  # before the rule learns
        self.shares = {} if shares is None else dict(zip(voters, shares.tolist(), strict=True))
        if self._reporting.is_asked and self.server.report.is_decided:
            set_buffers_(self._model.buffers, [reported[worker].buffers for worker in voters])
        log_round(t, self.server.report, self.nodes, answers.silent)
        if self.checkpoint is not None:
            checkpoint.save(self.checkpoint, self.state_dict())
        means = self._means.of(t, [reported[worker].metrics for worker in voters])
        summary: dict[str, Any] = {
            "ballots": len(voters),
            "refused": len(self.server.report.refused),
            "decided": int(self.server.report.is_decided),
        }
        for name in ("loss", "loss" + LEFT_OUT):
            if name in means:
                summary[name] = means[name]
        return self._model.arrays(), MetricRecord(summary)

    def _counted(self, opened: Round, answers: Iterable[tuple[int, RecordDict]]) -> dict[int, Reported]:
        """Give the round its ballots. Returns the rest of what their workers sent."""
        reported = {}
        buffers = self._model.buffers if self._reporting.is_asked else {}
        for worker, content in answers:
            if not is_vote(content):
                continue
            receipt = opened.add(worker, ballot_in(content))  # type: ignore[arg-type]  # None is refused
            if receipt.status == "admitted":
                metrics = self._means.read(content, opened.number)
                reported[worker] = Reported(metrics, buffers_in(content, buffers))
        return reported

    def _apply(self, t: int, message: bytes) -> None:
        """Step the server's model, and keep the decision for nodes that will lack it."""
        decision = parse(
            message,
            layout=self.layout,
            run=self.server.run,
            round=t,
            worker=SERVER,
        )
        step = self._model.apply(decision)
        self.progress.add(t, Decision(step, message), limit_bytes=self._model.nbytes)

    # ---- evaluation on the nodes -----------------------------------------------------------------

    def configure_evaluate(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """Every `evaluate_every` rounds, ask the nodes that were asked to vote in this round."""
        if not self.evaluate_every or self.round % self.evaluate_every:
            return []
        config["server-round"] = self.round
        return self._messages(arrays, config, MessageType.EVALUATE)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The plain mean of each metric over the nodes that report it as a finite number."""
        t = self.round
        answers = Answers(self.progress, self._asked.nodes, t).read(replies, t)
        reported = {worker: self._means.read(content, t) for worker, content in answers}
        means = self._means.of(t, [reported[worker] for worker in sorted(reported)])
        return MetricRecord(means) if means else None  # type: ignore[arg-type]  # a dict is invariant

    # ---- stopping and resuming -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The content of a checkpoint: the model, the server's trust, the node id of each worker."""
        return {
            "kind": "flower",
            "version": VERSION,
            "model": self.model,
            "server": self.server.state_dict(),
            **self.progress.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state. The next round sends every node the whole model."""
        check_state(state, kind="flower")
        state = upgraded(state, "the checkpoint", VERSION, {1: _with_workers})
        self.server.load_state_dict(state["server"])
        self._model.load(state["model"])
        self.progress = Progress(self.progress.limit, state)


def _with_workers(state: dict[str, Any]) -> dict[str, Any]:
    """Format 2 names the worker of each node, because nodes may be forgotten."""
    nodes = state["nodes"]
    return {
        **state,
        "workers": list(range(len(nodes))),
        "next_worker": len(nodes),
    }


def _check_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise ConfigError(f"{name} is {value}; it must be {least} or more")
