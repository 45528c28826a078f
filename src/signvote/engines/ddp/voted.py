"""The parameters that an optimizer votes on, in the order of the layout: group by group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from signvote.core.encoding import Encoding
from signvote.core.layout import Layout, trainable
from signvote.core.rule import Rule
from signvote.core.server import Server
from signvote.core.trust import State
from signvote.engines.ddp.local_poll import LocalPoll
from signvote.engines.ddp.members import Members
from signvote.engines.ddp.past import Decided
from signvote.engines.ddp.poll import Poll
from signvote.engines.ddp.stepping import Setting, Stepping
from signvote.engines.ddp.team import team_of
from signvote.engines.ddp.torch_names import like_shard, local_of
from signvote.engines.ddp.transport import Transport
from signvote.errors import ConfigError


class Entry(NamedTuple):
    """One parameter."""

    name: str
    parameter: Tensor
    group: int  # the place of its group


def entries_of(groups: Sequence[dict[str, Any]]) -> list[Entry]:
    """All parameters; without names they are numbered. Those of `parameter_groups` have the order of the model."""
    entries: list[Entry] = []
    places: list[float] = []
    for group_place, group in enumerate(groups):
        names = group.get("param_names")
        for place, parameter in enumerate(group["params"]):
            name = str(len(entries)) if names is None else names[place]
            entries.append(Entry(name, parameter, group_place))
        places += group.get("places", [math.inf] * len(group["params"]))
    ordered = sorted(zip(places, entries, strict=True), key=lambda pair: pair[0])
    return [entry for _, entry in ordered]


class Votes:
    """The votes of an optimizer: the poll, and the parameters that step by its decisions.

    Lr, momentum and weight decay are read from the optimizer's groups in every step: schedulers change them, and
    loading a state replaces the groups.

    Args:
        poll: on these parameters.
        entries: the parameters.
        frozen: the other parameters of the optimizer.

    """

    def __init__(self, poll: Poll, entries: Sequence[Entry], frozen: Sequence[Entry] = ()) -> None:
        self.poll = poll
        self.entries = entries
        self._frozen = frozen
        self.parameters = [entry.parameter for entry in entries]
        self._groups = [entry.group for entry in entries]
        self.stepping = Stepping(self.parameters, poll.placement.parts, self._groups)
        self._views: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by the address of the vector of momentum
        self._betas: tuple[list[float], Tensor] | None = None

    def gradients(self) -> list[Tensor | None]:
        """The gradients of this rank, of its shards. Frozen parameters have none."""
        for entry in self._frozen:
            if entry.parameter.grad is not None:
                raise ConfigError(
                    f"{entry.name} was frozen at the first step and has a gradient now; to unfreeze it later, freeze"
                    " it after the first step, or make a new optimizer when you unfreeze it"
                )
        found = [parameter.grad if parameter.requires_grad else None for parameter in self.parameters]
        for entry, gradient in zip(self.entries, found, strict=True):
            if gradient is not None and gradient.is_sparse:
                raise ConfigError(
                    f"the gradient of {entry.name} is sparse; make its embedding with sparse=False"
                )
        is_plain = self.poll.team.shards is None
        return found if is_plain else [None if each is None else local_of(each) for each in found]

    def settings(self, groups: Sequence[dict[str, Any]]) -> list[Setting]:
        """Lr and weight decay of each group."""
        return [Setting(float(group["lr"]), float(group["weight_decay"])) for group in groups]

    def momentum(self, groups: Sequence[dict[str, Any]]) -> float | Tensor:
        """The momentum of all groups, or that of each coordinate if groups differ."""
        betas = [float(group["momentum"]) for group in groups]
        if len({betas[group] for group in self._groups}) == 1:
            return betas[self._groups[0]]
        if self._betas is None or self._betas[0] != betas:
            by_coordinate = torch.zeros_like(self.poll.sender.gradients.vector)
            for part, group in zip(self.poll.placement.parts, self._groups, strict=True):
                by_coordinate[part.start : part.stop] = betas[group]
            self._betas = (betas, by_coordinate)
        return self._betas[1]

    def momenta(self) -> list[tuple[Tensor, Tensor]]:
        """Each parameter and its momentum, in its shape; nothing where there is no momentum."""
        average = self.poll.sender.memory.average
        if average is None:
            return []
        address = average.data_ptr()
        if address not in self._views:
            if len(self._views) == 2:  # the average moves between two vectors; these are of an earlier state
                self._views.clear()
            flat = [average[part.start : part.stop] for part in self.poll.placement.parts]
            pairs = zip(self.parameters, flat, strict=True)
            self._views[address] = [(p, like_shard(p, view)) for p, view in pairs]
        return self._views[address]

    # ---- as a model that catches up, see `catching_up.py` ----

    @torch.no_grad()
    def apply(self, decided: Decided) -> None:
        """Step by a decision of the past."""
        self.stepping.step(decided.decision, decided.used, decided.settings, decided.is_decided)

    def state(self) -> State:
        """Parameters and masters, by name."""
        masters = {self.entries[place].name: master for place, master in self.stepping.masters.items()}
        own = {entry.name: entry.parameter.detach() for entry in self.entries}
        return {"parameters": own, "masters": masters}

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Overwrite parameters and masters."""
        for place, entry in enumerate(self.entries):
            entry.parameter.copy_(state["parameters"][entry.name])
            self.stepping.load_master(place, state["masters"].get(entry.name))


def _device_of(parameters: Iterable[Tensor]) -> torch.device:
    """The device of all parameters."""
    devices = {local_of(parameter).device for parameter in parameters}
    if len(devices) > 1:
        raise ConfigError(f"the parameters lie on {len(devices)} devices; one per rank is supported")
    return devices.pop()


def make_poll(
    parameters: dict[str, Tensor],
    *,
    momentum: float,
    rule: str | Rule,
    encoding: Encoding,
    transport: Transport,
    server: dict[str, Any],
    worker_id: int | None,
    group: dist.ProcessGroup | None,
    timeout: float,
    members: Members | None = None,
    steps: str = "",
) -> Poll:
    """The votes on these parameters. Gradients and momentum are at least of 32 bits."""
    layout = Layout(trainable(parameters).items())
    dtypes = [parameter.dtype for parameter in parameters.values()]
    widest = reduce(torch.promote_types, dtypes, torch.float32)
    device = _device_of(parameters.values())
    decides = Server(layout, rule, zeros=encoding.zeros, **server)
    used = replace(encoding, momentum=momentum)
    if members is not None:
        from signvote.engines.ddp.elastic import ElasticPoll  # needs gloo

        return ElasticPoll(
            parameters,
            decides,
            members=members,
            encoding=used,
            transport=transport,
            dtype=widest,
        )
    team = team_of(parameters, group, device, timeout)
    kind = LocalPoll if encoding.scales else Poll
    return kind(
        parameters,
        decides,
        team,
        encoding=used,
        transport=transport,
        worker_id=worker_id,
        steps=steps,
        dtype=widest,
    )
