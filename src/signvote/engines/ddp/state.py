"""The state of DDP's hook, and what it has in common with the optimizer: both hold their votes in a `Poll`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from signvote.core.bits import Zeros
from signvote.core.encoding import Encoding, check_batch_size, check_top
from signvote.core.layout import Layout, trainable
from signvote.core.report import RoundReport
from signvote.core.rule import Rule
from signvote.core.samples import SampleCount
from signvote.core.server import Server
from signvote.core.trust import State
from signvote.engines.ddp.balance import Balancer, Stopwatch
from signvote.engines.ddp.gradients import Bucket
from signvote.engines.ddp.handshake import check_model
from signvote.engines.ddp.poll import Poll
from signvote.engines.ddp.process_group import ProcessGroup, check_ready, ranks_of
from signvote.engines.ddp.steps import StepWatch
from signvote.engines.ddp.team import Team
from signvote.engines.ddp.transport import CHECK_EVERY, CHUNK, Transport
from signvote.errors import ConfigError
from signvote.kernels import Planes


class Voting:
    """What the hook's state and the optimizer both show about their votes."""

    @property
    def poll(self) -> Poll:
        """The votes of this rank."""
        raise NotImplementedError

    @property
    def worker_id(self) -> int:
        """The key of this worker's trust."""
        return self.poll.worker_id

    @property
    def layout(self) -> Layout:
        """The layout of the trained parameters."""
        return self.poll.layout

    @property
    def round(self) -> int:
        """The last round decided, from 1."""
        return self.poll.round

    @property
    def report(self) -> RoundReport:
        """The last round: the voters, the abstentions and their reasons, how often each voter was overruled."""
        return self.poll.report

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes that the workers declared in the last round; 0: not declared."""
        return self.poll.batch_sizes

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to other ranks in the last round."""
        return self.poll.exchange.bytes_sent

    @property
    def top(self) -> float | None:
        """The share of the coordinates that this rank votes on; it may change between rounds."""
        return self.poll.sender.top

    @top.setter
    def top(self, share: float | None) -> None:
        if self.top is None or share is None:
            raise ConfigError(f"top was {self.top} at the start and cannot become {share}")
        check_top(share)
        self.poll.sender.top = share

    def rank_state(self) -> State:
        """This rank's state, besides the model. The states of all ranks together make a checkpoint."""
        return self.poll.state_dict()

    def load_rank_states(self, *states: State) -> None:
        """Resume from the states of all ranks. Their number may differ from now; a new rank starts without momentum."""
        self.poll.load_state_dict(*states)


class VoteState(Voting):
    """The state of `vote_hook` and `vote_gradients` between rounds. Every rank makes one, as with DDP itself.

    Args:
        model: the module, or its DistributedDataParallel.
        rule: as for `Server`; options of the rule follow as keyword arguments.
        momentum: of the gradients whose signs are sent; leave the optimizer's at 0.
        interpolation: the signs are those of alpha m + (1 - alpha) g instead, m being the average so far: Lion's 0.9,
            with a momentum of 0.99.
        clip: gradients are scaled down to this norm before momentum averages them; None: never. As with `feedback`,
            votes then travel after all gradients are computed.
        polar: of each matrix, the signs of the average's polar factor are sent: for language models. As with
            `feedback`, votes then travel after all gradients are computed.
        zeros: what a zero gradient sends, and a zero tally decides.
        top: vote only on this share of the coordinates, those of largest magnitude; None: on all. As with `feedback`,
            votes then travel after all gradients are computed.
        feedback: add the residual, the part that this round's signs left out, to the next signal.
        run: the run's number, the same on all ranks.
        batch_size: samples of this rank in a round, for rules that use it; 0: not declared. None: the balancer's, or
            else the first dimension of the batches that pass through the model, evaluation aside.
        worker_id: the key of this rank's trust; None: the rank. Give it if ranks may change machines.
        min_voters: a round with fewer voters decides nothing, and no parameter moves, not even by weight decay:
            gradients become None, which an optimizer skips, or infinite, with which AMP's scaler skips the step.
        balancer: sets batch sizes from the time that each rank took.
        scaler: AMP's scaler, if there is one: gradients are unscaled before the vote and decisions scaled.
        overlap: chunks travel while the rest of the gradients is computed; False: the same, one after the other.
        timeout: seconds to wait for a rank; the error names the ranks that are alive.
        check_every: rounds between two looks whether ranks have equal parameters and step by decisions; 0: never.
        chunk: coordinates that travel together.
        group: the process group of the ranks that vote; None: all.
        encoding: all settings of the encoder as one object, instead of these.
        options: keyword arguments of the rule.

    """

    def __init__(
        self,
        model: nn.Module,
        rule: str | Rule = "weighted",
        *,
        momentum: float = 0.9,
        interpolation: float | None = None,
        clip: float | None = None,
        polar: bool = False,
        zeros: Zeros = "coin",
        top: float | None = None,
        feedback: bool = False,
        run: int = 0,
        batch_size: int | None = None,
        worker_id: int | None = None,
        min_voters: int = 1,
        balancer: Balancer | None = None,
        scaler: torch.amp.GradScaler | None = None,
        overlap: bool = True,
        timeout: float = 300.0,
        check_every: int = CHECK_EVERY,
        chunk: int = CHUNK,
        group: dist.ProcessGroup | None = None,
        encoding: Encoding | None = None,
        **options: Any,
    ) -> None:
        check_model(model)
        check_ready()
        if batch_size is not None:
            check_batch_size(batch_size)
        transport = Transport(overlap=overlap, chunk=chunk, check_every=check_every)
        if encoding is None:
            encoding = Encoding(
                momentum=momentum,
                interpolation=interpolation,
                clip=clip,
                polar=polar,
                zeros=zeros,
                top=top,
                feedback=feedback,
            )
        module = model.module if isinstance(model, DistributedDataParallel) else model
        parameters = trainable(module)
        server = Server(
            Layout.of(parameters),
            rule,
            run=run,
            zeros=encoding.zeros,
            min_voters=min_voters,
            **options,
        )
        device = next(iter(parameters.values())).device
        team = Team(ProcessGroup(ranks_of(group), device, timeout))
        self._poll = Poll(
            parameters,
            server,
            team,
            encoding=encoding,
            transport=transport,
            worker_id=worker_id,
        )
        team.connect()
        self.batch_size = batch_size
        self.samples = SampleCount(module)  # since the last vote
        self.balancer = balancer
        self.scaler = scaler
        self.stopwatch = Stopwatch()
        self.steps = StepWatch(parameters.values(), check_every)
        self.buckets: list[Bucket] = []  # of DDP, in this round

    @property
    def poll(self) -> Poll:
        """The votes of this rank."""
        return self._poll

    def put(self, parameters: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> None:
        """Copy gradients; encode and send the chunks that are complete."""
        if self.scaler is not None:
            self.poll.sender.scale = self.scaler.get_scale()
        self.poll.put(parameters, gradients)

    def decide(self, since: float) -> Planes:
        """Hold the vote and return the decision on all coordinates.

        Args:
            since: when the last gradient was computed.

        """
        outcome = self.poll.decide(self._declared(), seconds=self.stopwatch.worked(since))
        if self.report.is_decided:
            self.steps.voted(1.0 if self.scaler is None else self.scaler.get_scale())
            if self.worker_id in self.report.abstained:  # otherwise the scaler sees that the step is skipped
                self._back_off()
        if self.balancer is not None:
            self.balancer.observe(outcome.seconds)
        self.stopwatch.begin()
        return outcome.decision

    def _declared(self) -> int:
        """The batch size of this rank in this round."""
        counted = self.samples.take()
        if self.balancer is not None:
            planned = self.balancer.sizes_after(self.round)
            counted = planned[self.poll.team.voters.rank]
        return counted if self.batch_size is None else self.batch_size

    def _back_off(self) -> None:
        """Lower AMP's scale, with which the gradients were not finite."""
        if self.scaler is not None:
            scale = self.scaler.get_scale() * self.scaler.get_backoff_factor()
            self.scaler.update(scale)

    def fill(self, parameters: Iterable[Tensor], gradients: Iterable[Tensor], decision: Planes) -> None:
        """Write the decision in place of gradients, times AMP's scale: the optimizer's step divides by it.

        If nothing was decided, AMP gets infinities, with which it skips the step.
        """
        if self.scaler is None:
            self.poll.sender.gradients.fill(parameters, gradients, decision, 1.0)
        elif self.report.is_decided:
            self.poll.sender.gradients.fill(parameters, gradients, decision, self.scaler.get_scale())
        else:
            for gradient in gradients:
                gradient.fill_(torch.inf)
        self.stopwatch.resume()

    def state_dict(self) -> State:
        """The same as `rank_state`."""
        return self.rank_state()

    def load_state_dict(self, *states: State) -> None:
        """The same as `load_rank_states`."""
        self.load_rank_states(*states)

    def load_rank_states(self, *states: State) -> None:
        """See Voting."""
        super().load_rank_states(*states)
        self.samples.take()
        self.stopwatch = Stopwatch()
