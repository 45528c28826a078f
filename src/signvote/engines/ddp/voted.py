"""The parameters that an optimizer votes on, in the order of the layout: group by group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from signvote.core.encoder import Encoding
from signvote.core.layout import Layout, trainable
from signvote.core.rule import Rule
from signvote.core.server import Server
from signvote.engines.ddp.poll import Poll, Transport
from signvote.engines.ddp.stepping import Setting, Stepping
from signvote.engines.ddp.team import team_of
from signvote.engines.ddp.torch_names import like_shard, local_of
from signvote.errors import ConfigError


class Entry(NamedTuple):
    """One parameter."""

    name: str
    parameter: Tensor
    group: int  # the place of its group


def entries_of(groups: Sequence[dict[str, Any]]) -> Iterator[Entry]:
    """All parameters; without names they are numbered."""
    number = 0
    for group_place, group in enumerate(groups):
        names = group.get("param_names")
        for place, parameter in enumerate(group["params"]):
            yield Entry(str(number) if names is None else names[place], parameter, group_place)
            number += 1


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
        self.stepping = Stepping(self.parameters, poll.placement.parts)
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
        found: list[Tensor | None] = []
        for entry in self.entries:
            gradient = entry.parameter.grad if entry.parameter.requires_grad else None
            if gradient is not None and gradient.is_sparse:
                raise ConfigError(
                    f"the gradient of {entry.name} is sparse; make its embedding with sparse=False"
                )
            found.append(None if gradient is None else local_of(gradient))
        return found

    def settings(self, groups: Sequence[dict[str, Any]]) -> list[Setting]:
        """Lr and weight decay of each parameter."""
        settings = [Setting(float(group["lr"]), float(group["weight_decay"])) for group in groups]
        return [settings[entry.group] for entry in self.entries]

    def momentum(self, groups: Sequence[dict[str, Any]]) -> float | Tensor:
        """The momentum of all groups, or that of each coordinate if groups differ."""
        betas = [float(groups[entry.group]["momentum"]) for entry in self.entries]
        if len(set(betas)) == 1:
            return betas[0]
        if self._betas is None or self._betas[0] != betas:
            by_coordinate = torch.zeros_like(self.poll.sender.gradients.vector)
            for part, beta in zip(self.poll.placement.parts, betas, strict=True):
                by_coordinate[part.start : part.stop] = beta
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
) -> Poll:
    """The votes on these parameters. Gradients and momentum are at least of 32 bits."""
    layout = Layout(trainable(parameters).items())
    dtypes = [parameter.dtype for parameter in parameters.values()]
    device = _device_of(parameters.values())
    team = team_of(parameters, group, device, timeout)
    return Poll(
        parameters,
        Server(layout, rule, zeros=encoding.zeros, **server),
        team,
        encoding=replace(encoding, momentum=momentum),
        transport=transport,
        worker_id=worker_id,
        dtype=reduce(torch.promote_types, dtypes, torch.float32),
    )
