"""The optimizer: `step()` encodes the gradients, holds the vote and steps by the decision.

    m <- beta m + (1 - beta) g                       this worker's momentum
    decision = sign of sum_m w[m] sign(m)            all workers' vote (paper, eq. 3)
    x <- (1 - lr * weight_decay) x - lr * decision   (paper, eq. 5)

A sign has no scale: clipping gradients to a norm changes what the momentum averages, and nothing else.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from signvote.core.bits import Zeros
from signvote.core.encoding import Encoding, check_batch_size
from signvote.core.rule import Rule
from signvote.core.trust import State
from signvote.engines.ddp.arguments import check_group, check_members
from signvote.engines.ddp.balance import Balancer, Stopwatch
from signvote.engines.ddp.members import Members
from signvote.engines.ddp.modules import Surroundings
from signvote.engines.ddp.optimizer_state import (
    MASTER,
    VOTES,
    by_parameter,
    is_own,
    load_poll,
    load_tensors,
    show_state,
    with_votes,
    without_votes,
)
from signvote.engines.ddp.overlap import Overlap
from signvote.engines.ddp.poll import Poll
from signvote.engines.ddp.state import Voting
from signvote.engines.ddp.steps import LARGE, too_large
from signvote.engines.ddp.team import check_sharded
from signvote.engines.ddp.torch_names import local_of, not_compiled
from signvote.engines.ddp.transport import CHECK_EVERY, CHUNK, Transport
from signvote.engines.ddp.voted import Votes, entries_of, make_poll
from signvote.errors import ConfigError, EngineError


class Vote(Optimizer, Voting):
    """An optimizer that steps by a vote of all ranks: one bit per parameter each way.

    In a plain loop, under DistributedDataParallel or with FSDP2 it takes the place of SGD or AdamW. Every rank steps
    with its own gradients; DDP's all-reduce is turned off for the parameters that are voted on. Without
    torch.distributed it is a world of one: signSGD with momentum.

    Args:
        params: parameters, named parameters or groups. A group may have its own lr, momentum and weight_decay.
            Those that require no gradient at the first step are left alone.
        lr: how far every weight moves in a step: 1e-3 is a good start, falling to 0 by a scheduler.
        momentum: of the gradients whose signs are sent.
        weight_decay: decoupled, times lr: x <- (1 - lr * weight_decay) x.
        rule: how workers are weighed, as for `Server`; options of the rule follow as keyword arguments.
        interpolation: the signs are those of alpha m + (1 - alpha) g instead, m being the average so far: Lion's 0.9,
            with a momentum of 0.99.
        polar: of each matrix, the signs of the average's polar factor are sent: for language models.
        zeros: what a zero gradient sends, and a zero tally decides.
        top: vote only on this share of the coordinates, those of largest magnitude; None: on all.
        feedback: add the residual, the part that this round's signs left out, to the next signal.
        run: the run's number, the same on all ranks.
        batch_size: samples of this rank in a step; 0: not declared. None: the balancer's, or else the first dimension
            of the batches that pass through the model. `step(batch_size=...)` comes first.
        worker_id: the key of this worker's trust; None: its rank in the group.
        min_voters: a round with fewer voters decides nothing, and no parameter moves.
        balancer: sets batch sizes from the time that each rank took.
        overlap: send gradients while the backward pass computes the rest: one backward pass a step, see `no_sync`, and
            no clipping.
        timeout: seconds to wait for a rank; the error names the ranks that are alive.
        check_every: rounds between two looks whether ranks have equal parameters; 0: never.
        chunk: coordinates that travel together.
        group: the ranks that vote; None: all. With FSDP2 the ranks that hold the same shards.
        members: workers that continue without those that die, hang or lose their link, instead of ranks.
        options: keyword arguments of the rule.

    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> model.weight.data.zero_()
    tensor([[0., 0.]])
    >>> optimizer = Vote(model.parameters(), lr=2**-7)
    >>> model(torch.tensor([[3.0, -4.0]])).sum().backward()
    >>> optimizer.step()
    >>> model.weight.tolist()
    [[-0.0078125, 0.0078125]]

    """

    _step_supports_amp_scaling = True  # GradScaler calls every step: an overflow is an abstention

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        rule: str | Rule = "weighted",
        interpolation: float | None = None,
        polar: bool = False,
        zeros: Zeros = "coin",
        top: float | None = None,
        feedback: bool = False,
        run: int = 0,
        batch_size: int | None = None,
        worker_id: int | None = None,
        min_voters: int = 1,
        balancer: Balancer | None = None,
        overlap: bool = False,
        timeout: float = 300.0,
        check_every: int = CHECK_EVERY,
        chunk: int = CHUNK,
        group: dist.ProcessGroup | None = None,
        members: Members | None = None,
        **options: Any,
    ) -> None:
        if members is not None:
            check_members(worker_id, group, balancer)
        if batch_size is not None:
            check_batch_size(batch_size)
        self._votes: list[
            Votes
        ] = []  # one, once it is needed; wrappers that delegate attributes share the list
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "weight_decay": weight_decay,
            },
        )
        self._make_poll = partial(
            make_poll,
            rule=rule,
            encoding=Encoding(
                momentum=momentum,
                interpolation=interpolation,
                polar=polar,
                zeros=zeros,
                top=top,
                feedback=feedback,
            ),
            transport=Transport(overlap=overlap, chunk=chunk, check_every=check_every),
            server={
                "run": run,
                "min_voters": min_voters,
                **options,
            },
            worker_id=worker_id,
            group=group,
            timeout=timeout,
            members=members,
        )
        self.batch_size = batch_size
        self.balancer = balancer
        self._stopwatch = Stopwatch()
        self._surroundings = Surroundings(self._parameters())
        check_sharded(
            {entry.name: entry.parameter for entry in entries_of(self.param_groups)},
            self._surroundings.modules,
            overlap=overlap,
            has_balancer=balancer is not None,
        )
        self._overlap = Overlap(self._parameters(), self._send_one) if overlap else None
        self._has_warned = False

    def _parameters(self) -> list[Tensor]:
        """The parameters of all groups."""
        return [p for group in self.param_groups for p in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, before the first step."""
        if self._votes:
            raise ConfigError(
                "parameters cannot be added after the first vote; give them to Vote from the start, and freeze"
                " them after the first step, or make a new optimizer"
            )
        super().add_param_group(param_group)
        check_group(self.param_groups[-1])

    # ---- a step ----------------------------------------------------------------------------------

    @property
    def poll(self) -> Poll:
        """The votes of this rank."""
        return self._begun().poll

    def _begun(self) -> Votes:
        """The votes, which begin when they are first needed. Nothing is exchanged by that."""
        if not self._votes:
            self._surroundings.check_replaced()
            everything = entries_of(self.param_groups)
            entries = [entry for entry in everything if entry.parameter.requires_grad]
            frozen = [entry for entry in everything if not entry.parameter.requires_grad]
            parameters = {entry.name: entry.parameter for entry in entries}
            momenta = [group["momentum"] for group in self.param_groups]
            poll = self._make_poll(parameters, momentum=max(momenta))
            votes = Votes(poll, entries, frozen)
            self._votes.append(votes)
            poll.moves(votes)
            self._show_state()
        return self._votes[0]

    @not_compiled
    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        batch_size: int | None = None,
    ) -> float | None:
        """Hold a vote and step by its decision. Every rank calls this as often as the others.

        A rank without a gradient, or with one that is not finite, abstains, and steps with the others.

        Args:
            closure: computes the loss again, and its gradients.
            batch_size: samples of this rank in this step; None: see `Vote`.

        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        worked = self._stopwatch.worked(self._now())
        self._surroundings.stop_looking()
        self._warn_of_lr()
        votes = self._begun()
        gradients = votes.gradients()
        self._prepare()
        votes.poll.put_all(gradients)
        outcome = votes.poll.decide(
            self._declared(batch_size),
            seconds=worked,
            used=[gradient is not None for gradient in gradients],
        )
        settings = votes.settings(self.param_groups)
        votes.stepping.step(outcome.decision, outcome.used, settings, outcome.is_decided)
        votes.poll.stepped(outcome, settings)
        if self.balancer is not None:
            self.balancer.observe(outcome.seconds)
        self._show_state()
        self._stopwatch.begin()
        self._stopwatch.resume()
        return loss

    def _prepare(self) -> None:
        """Set what this round's gradients are encoded by."""
        votes = self._begun()
        votes.poll.sender.momentum = votes.momentum(self.param_groups)
        scale = getattr(self, "grad_scale", None)  # set by GradScaler, unless it has unscaled the gradients
        votes.poll.sender.scale = 1.0 if scale is None else torch.as_tensor(scale, dtype=torch.float64)
        if self._overlap is not None:
            self._overlap.check(is_alone=votes.poll.team.is_alone)
            if scale is not None:
                raise EngineError(
                    "overlap=True sends gradients before GradScaler's scale is known; use overlap=False"
                )

    def _send_one(self, parameter: Tensor) -> None:
        """Send a gradient while others are computed. A rank that is alone reads all of them in `step`."""
        votes = self._begun()
        if votes.poll.team.is_alone:
            return
        votes.poll.sender.momentum = votes.momentum(self.param_groups)
        if parameter.grad is not None:
            with torch.no_grad():
                votes.poll.put([parameter], [local_of(parameter.grad)])

    def leave(self) -> None:
        """With `members`, after the last round: wait until all have it. Call it on every worker."""
        self.poll.leave()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """With `overlap=True`: the backward passes inside only accumulate gradients, and send nothing."""
        if self._overlap is None:
            yield
            return
        self._overlap.is_paused = True
        try:
            yield
        finally:
            self._overlap.is_paused = False

    def _declared(self, batch_size: int | None) -> int:
        """The batch size of this rank in this round."""
        declared = self._surroundings.take_samples()
        if self.balancer is not None:
            planned = self.balancer.sizes_after(self.round)
            declared = planned[self.poll.team.voters.rank]
        if self.batch_size is not None:
            declared = self.batch_size
        if batch_size is not None:
            check_batch_size(batch_size)
            declared = batch_size
        return declared

    def _now(self) -> float:
        """The time at which all gradients are computed, if anybody asks for it."""
        if self.balancer is not None and torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return time.perf_counter()

    def _warn_of_lr(self) -> None:
        """Warn once of a learning rate that is meant for gradients."""
        largest = max(float(group["lr"]) for group in self.param_groups)
        if largest > LARGE and not self._has_warned:
            self._has_warned = True
            warnings.warn(too_large(largest), stacklevel=4)

    # ---- state -----------------------------------------------------------------------------------

    def _show_state(self) -> None:
        """Have `self.state` hold the momentum and the masters, as of any optimizer of PyTorch."""
        show_state(self._begun(), self.state)

    def named_state(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """The name of each parameter that is voted on, and its state: momentum, and the master of one of 16 bits."""
        votes = self._begun()
        self._show_state()
        for entry in votes.entries:
            yield entry.name, self.state[entry.parameter]

    def forget_time(self) -> None:
        """Do not count the time since the last step as work, as after loading a checkpoint."""
        self._stopwatch = Stopwatch()

    def state_dict(self) -> State:
        """The state of this rank: by parameter its momentum, and under "votes" the trust in all workers.

        Momentum differs between workers. To resume exactly, save the state of every rank, as `save` does. Before the
        first step there is nothing to save, and "votes" is None.
        """
        usual = super().state_dict()
        if not self._votes:
            return usual | {VOTES: None}
        return with_votes(usual, self._votes[0])

    def load_state_dict(self, state_dict: State) -> None:
        """Resume from a state. From that of another worker all but the momentum is loaded."""
        saved = by_parameter(state_dict, self._parameters())
        usual = without_votes(state_dict)
        if state_dict[VOTES] is None:
            self._votes.clear()
            super().load_state_dict(usual)
        else:
            votes = self._begun()
            load_poll(votes, state_dict)
            super().load_state_dict(usual)
            self.state.clear()
            load_tensors(votes, saved, is_own=is_own(votes, state_dict))
            self._show_state()
        self.forget_time()

    def rank_state(self) -> State:
        """See Voting. Masters are part of it."""
        votes = self._begun()
        masters = {}
        for place, master in votes.stepping.masters.items():
            name = votes.entries[place].name
            masters[name] = master.clone()
        return {**super().rank_state(), MASTER: masters}

    def load_rank_states(self, *states: State) -> None:
        """See Voting."""
        votes = self._begun()
        super().load_rank_states(*states)
        masters = states[0].get(MASTER, {})
        for place, entry in enumerate(votes.entries):
            votes.stepping.load_master(place, masters.get(entry.name))
        self._show_state()
        self.forget_time()

    def __repr__(self) -> str:
        """The groups, and what the votes are about."""
        lines = [super().__repr__()]
        if self._votes:
            poll = self._votes[0].poll
            workers = poll.team.voters.world
            lines.append(
                f"votes: {poll.layout.size} coordinates, {workers} workers, rule {poll.server.rule.name}"
            )
        if self._surroundings.silenced:
            lines.append(
                "DDP's all-reduce is off for these parameters: their gradients are voted on in step()"
            )
        return "\n".join(lines)
