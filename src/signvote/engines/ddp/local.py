"""Local steps and then a vote: each rank trains by itself, and every so often all vote on what has changed.

    y = x - e                       x: the parameters of the last vote, e: what this rank's votes have left out
    p = (y - inner(y)) + e          inner: the steps of this rank's optimizer
    all send sign(p), and for each tensor s = mean |p|;  e <- p - s sign(p)
    all get sign(q), and for each tensor S = mean |q|    of the weighted mean q of all s sign(p): see core/scaled.py
    b <- momentum b + S sign(q)
    x <- x - step (S sign(q) + momentum b)               core/outer.py

The optimizer inside is any of PyTorch's. Its state stays on its rank, and so does the residual e.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from signvote.core.encoding import Encoding, check_batch_size
from signvote.core.layout import Layout, trainable
from signvote.core.outer import Outer
from signvote.core.rule import Rule
from signvote.core.rules import make_rule
from signvote.core.scaled import ScaledVotes
from signvote.core.scales import own_start
from signvote.core.trust import State
from signvote.engines.ddp.local_poll import LocalPoll
from signvote.engines.ddp.modules import Surroundings
from signvote.engines.ddp.state import Voting
from signvote.engines.ddp.torch_names import copy_all_, not_compiled
from signvote.engines.ddp.transport import CHUNK, Transport
from signvote.engines.ddp.voted import entries_of, make_poll
from signvote.errors import ConfigError
from signvote.formats import check_state, upgraded

VERSION = 1
TYPES = (torch.float32, torch.float64)


class Begun(NamedTuple):
    """The votes of a `LocalVote`, once they have begun."""

    poll: LocalPoll
    parameters: list[Tensor]
    start: Tensor  # the parameters of the last vote, as one vector
    views: list[Tensor]  # of it, in the shapes of the parameters


class LocalVote(Voting):
    """Any optimizer with a vote on the parameters after every few steps: one bit per parameter and vote each way.

    Between votes nothing is sent. A vote moves all ranks to the same parameters. At the next forward pass in training a
    rank adds what its votes have left out so far, and continues from there. DDP's all-reduce is turned off for these
    parameters. Without torch.distributed it is a world of one. Ranks may take different numbers of steps: a slow one
    can vote after fewer.

    Args:
        optimizer: takes the local steps; its parameters are voted on. Give it, not this one, to a scheduler.
        every: steps between two votes.
        step: how much of the change that was voted on is applied.
        momentum: of these changes, Nesterov's.
        rule: how workers are weighed: `majority`, `weighted` or `robust`; its options follow as keyword arguments.
        run: the run's number, the same on all ranks.
        batch_size: samples of this rank between two votes; 0: not declared. None: counted in the model's batches.
        worker_id: the key of this worker's trust; None: its rank in the group.
        min_voters: a vote of fewer decides nothing: all return to the parameters of the vote before.
        timeout: seconds to wait for a rank; the error names the ranks that are alive.
        check_every: votes between two looks whether ranks have equal parameters; 0: never.
        chunk: coordinates that travel together.
        group: the ranks that vote; None: all.
        options: keyword arguments of the rule.

    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> _ = torch.nn.init.zeros_(model.weight)
    >>> inner = torch.optim.SGD(model.parameters(), lr=0.25)
    >>> optimizer = LocalVote(inner, every=2, step=1.0, momentum=0.0)
    >>> for _ in range(2):
    ...     optimizer.zero_grad()
    ...     model(torch.tensor([[1.0, -1.0]])).sum().backward()
    ...     optimizer.step()
    >>> model.weight.tolist(), optimizer.round
    ([[-0.5, 0.5]], 1)

    """

    def __init__(
        self,
        optimizer: Optimizer,
        every: int = 30,
        *,
        step: float = 0.7,
        momentum: float = 0.6,
        rule: str | Rule = "weighted",
        run: int = 0,
        batch_size: int | None = None,
        worker_id: int | None = None,
        min_voters: int = 1,
        timeout: float = 300.0,
        check_every: int = 1,
        chunk: int = CHUNK,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        if every < 1:
            raise ConfigError(f"every is {every}; it must be 1 or more steps")
        if batch_size is not None:
            check_batch_size(batch_size)
        self.optimizer = optimizer
        self.every = every
        self.outer = Outer(step=step, momentum=momentum)
        self.batch_size = batch_size
        self.steps = 0  # since the last vote
        self._begun: Begun | None = None
        self._is_own = False  # whether the parameters are this rank's own; after a vote they are everybody's
        parameters = [p for each in optimizer.param_groups for p in each["params"]]
        self._surroundings = Surroundings(parameters, self._begin)
        self._change: list[Tensor] | None = None  # of a vote that has not succeeded yet
        self._make_rule = partial(_scaled_rule, rule, options)
        self._make_poll = partial(
            make_poll,
            momentum=0.0,
            encoding=Encoding(scales=True),
            transport=Transport(overlap=False, chunk=chunk, check_every=check_every),
            server={"run": run, "min_voters": min_voters},
            worker_id=worker_id,
            group=group,
            timeout=timeout,
            steps=f"step {step}, momentum {momentum}",
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer inside."""
        return self.optimizer.param_groups

    @property
    def poll(self) -> LocalPoll:
        """The votes of this rank."""
        return self._votes().poll

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none)

    def _votes(self) -> Begun:
        """The votes, which begin when they are first needed. Nothing is exchanged by that."""
        if self._begun is None:
            named = {entry.name: entry.parameter for entry in entries_of(self.param_groups)}
            parameters = {name: p for name, p in named.items() if p.requires_grad}
            layout = Layout(trainable(parameters).items())
            _check_types(parameters)
            poll = self._make_poll(parameters, rule=self._make_rule(layout))
            assert isinstance(poll, LocalPoll)
            first = next(iter(parameters.values()))
            start = torch.zeros(layout.size, dtype=first.dtype, device=first.device)
            views = [start[s.start : s.stop].view(s.shape) for s in layout.segments]
            self._begun = Begun(poll, list(parameters.values()), start, views)
        return self._begun

    # ---- steps and votes -------------------------------------------------------------------------

    @not_compiled
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take a local step; after every `every`-th hold a vote, as all ranks do then."""
        self._surroundings.stop_looking()
        self._begin()
        loss: float | None = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        self.steps += 1
        if self.steps >= self.every:
            self.vote()
        return loss

    @torch.no_grad()
    def _begin(self) -> None:
        """Before the first pass after a vote, note the parameters, which anybody may have changed, and start from y."""
        if self._is_own or self._change is not None:
            return
        votes = self._votes()
        locals_ = [p.detach() for p in votes.parameters]
        copy_all_(votes.views, locals_)
        copy_all_(locals_, self._own_start(votes))
        self._is_own = True

    def _own_start(self, votes: Begun) -> list[Tensor]:
        """Where the local steps start: y, in the shapes of the parameters."""
        start = own_start(votes.start, votes.poll.sender.memory.residual)
        return [start[s.start : s.stop].view(s.shape) for s in votes.poll.layout.segments]

    @torch.no_grad()
    def vote(self) -> None:
        """Hold a vote now on what has changed since the last one. Every rank calls this, or reaches it in `step`.

        A rank whose change is not finite abstains, and its optimizer starts anew. After an EngineError, calling this
        again repeats the vote with the same change.
        """
        self._surroundings.stop_looking()
        self._begin()
        votes = self._votes()
        poll, parameters, start, views = votes
        locals_ = [p.detach() for p in parameters]
        if self._change is None:
            self._change = [y - p for y, p in zip(self._own_start(votes), locals_, strict=True)]
        else:
            poll.begin()
        copy_all_(locals_, views)  # ranks are equal again, which the vote checks
        poll.put(parameters, self._change)
        outcome = poll.decide(self._declared())
        if poll.codes is not None:
            self.outer.step_(start, outcome.decision, poll.codes, poll.layout)
            copy_all_(locals_, views)
        if self.worker_id in self.report.abstained:
            self.optimizer.state.clear()
        self._change = None
        self._is_own = False
        self.steps = 0

    def _declared(self) -> int:
        """The batch size of this rank in this round."""
        counted = self._surroundings.take_samples()
        return counted if self.batch_size is None else self.batch_size

    # ---- state -----------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """The state of this rank, besides the model: its optimizer's, and that of the votes.

        Between two votes ranks differ in their parameters, too: save each rank's model with it.
        """
        return {
            "kind": "local vote",
            "version": VERSION,
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
            "is_own": self._is_own,
            "start": self._votes().start.clone(),
            "outer": self.outer.state_dict(),
            "votes": self.poll.state_dict(),
        }

    def load_state_dict(self, state_dict: State) -> None:
        """Resume from the state of the same worker."""
        self.load_rank_states(state_dict)

    def rank_state(self) -> State:
        """See Voting: the same as `state_dict`. Save after a vote, when all ranks have the same parameters."""
        return {**self.state_dict(), "worker": self.worker_id}

    def load_rank_states(self, *states: State) -> None:
        """See Voting. A new rank starts without optimizer state."""
        for state in states:
            check_state(upgraded(state, "a local vote's state", VERSION), kind="local vote")
        poll, _, start, _ = self._votes()
        poll.load_state_dict(*(state["votes"] for state in states))
        self.outer.load_state_dict(states[0]["outer"], start)
        own = [state for state in states if state["votes"]["worker"] == self.worker_id]
        self.steps = own[0]["steps"] if own else 0
        self._is_own = own[0]["is_own"] if own else False
        self._change = None
        if own:
            self.optimizer.load_state_dict(own[0]["optimizer"])
            start.copy_(own[0]["start"])

    def __repr__(self) -> str:
        """The optimizer inside, and how often ranks vote."""
        return f"LocalVote(every {self.every} steps of {self.optimizer!r})"


def _scaled_rule(rule: str | Rule, options: dict[str, Any], layout: Layout) -> ScaledVotes:
    """A rule for scaled votes: one by name, or a Rule made for the layout."""
    if isinstance(rule, ScaledVotes):
        return rule
    return ScaledVotes(rule if isinstance(rule, Rule) else make_rule(rule, layout, **options))


def _check_types(parameters: dict[str, Tensor]) -> None:
    """Raise unless all parameters have one type of 32 or 64 bits."""
    found = {p.dtype for p in parameters.values()}
    if len(found) != 1 or not found <= set(TYPES):
        names = ", ".join(sorted(map(str, found)))
        raise ConfigError(
            f"the parameters are of {names}; LocalVote needs all in float32, or all in float64: compute in 16 bits with"
            " torch.autocast"
        )
