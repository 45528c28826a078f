"""Steps parameters by a decision: x <- (1 - lr * weight_decay) x - lr * decision (paper, eq. 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from signvote.core.worker import HALVES, step_
from signvote.engines.ddp.placement import Part
from signvote.engines.ddp.torch_names import local_of, step_all_
from signvote.kernels import Planes, backend


class Setting(NamedTuple):
    """How a parameter steps."""

    lr: float
    decay: float


class Stepping:
    """The parameters of this rank. Those of 16 bits have a master in float32, which steps in their place.

    A step of 1e-3 does not change a bfloat16 of 1: the nearest larger one is 1.0078.

    Args:
        parameters: in the order of the layout.
        parts: where each lies in the flat vector.

    """

    def __init__(self, parameters: Sequence[Tensor], parts: Sequence[Part]) -> None:
        self.masters: dict[int, Tensor] = {}  # by the place of the parameter
        self._parameters = parameters
        self._parts = parts
        self._directions: Tensor | None = None  # the decision as numbers, on a GPU
        self._direction_of: list[Tensor] = []  # by the place of the parameter
        for place in range(len(parameters)):
            local = self._local(place)
            if local.dtype in HALVES:
                self.masters[place] = local.float().contiguous()
        self._versions = self._versions_now()

    def _local(self, place: int) -> Tensor:
        """The part of a parameter on this rank; FSDP2 may put it into other memory between two steps."""
        return local_of(self._parameters[place]).detach()

    def load_master(self, place: int, master: Tensor | None) -> None:
        """Set the master of a parameter; None: the parameter's own value."""
        if place in self.masters:
            self.masters[place].copy_(self._local(place) if master is None else local_of(master))

    def step(self, decision: Planes, used: Sequence[bool], settings: Sequence[Setting]) -> None:
        """Step the parameters that some rank has a gradient of.

        Args:
            decision: on the flat vector.
            used: which parameters have a gradient on some rank.
            settings: of each parameter.

        """
        self._follow()
        places = [place for place, part in enumerate(self._parts) if used[place] and part.start < part.stop]
        if decision.signs.device.type == "cpu":
            for place in places:
                lr, decay = settings[place]
                step_(self._target(place), decision, self._parts[place].start, lr, decay)
        elif places:
            self._step_at_once(decision, places, settings)
        for place in self.masters.keys() & set(places):
            self._local(place).copy_(self.masters[place])
        self._versions = self._versions_now()

    def _follow(self) -> None:
        """Take over what somebody else has changed in a parameter, as by loading a model.

        Elements that still are the rounded master keep it: a model may be loaded before or after the masters.
        """
        for place, version in self._versions_now().items():
            if self._versions[place] == version:
                continue
            local = self._local(place)
            master = self.masters[place]
            is_changed = local != master.to(local.dtype)
            master.copy_(torch.where(is_changed, local.float(), master))

    def _versions_now(self) -> dict[int, tuple[int, int]]:
        """Where each parameter with a master lies, and how often it was written to."""
        locals_ = {place: self._local(place) for place in self.masters}
        return {place: (local.data_ptr(), local._version) for place, local in locals_.items()}

    def _target(self, place: int) -> Tensor:
        """What steps: the master of a parameter, or its part on this rank."""
        master = self.masters.get(place)
        return self._local(place) if master is None else master

    def _step_at_once(self, decision: Planes, places: Sequence[int], settings: Sequence[Setting]) -> None:
        """In few launches: the decision as +1 and -1, then all parameters of one lr and decay together."""
        if self._directions is None:
            self._directions = torch.empty(self._parts[-1].stop, device=decision.signs.device)
            flat = [self._directions[part.start : part.stop] for part in self._parts]
            self._direction_of = [
                direction.view(self._local(place).shape) for place, direction in enumerate(flat)
            ]
        self._directions.zero_()
        backend(decision.signs.device).step_(self._directions, decision, 0, -1.0)
        by_setting: dict[Setting, list[int]] = {}
        for place in places:
            by_setting.setdefault(settings[place], []).append(place)
        for (lr, decay), alike in by_setting.items():
            parameters = [self.masters.get(place, self._parameters[place]) for place in alike]
            targets = [
                local_of(parameter) for parameter in parameters
            ]  # no `detach`, which costs the host 2 us each
            directions = [self._direction_of[place] for place in alike]
            step_all_(targets, directions, lr, decay)
