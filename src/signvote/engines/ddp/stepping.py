"""Steps parameters by a decision: x <- (1 - lr * weight_decay) x - lr * decision (paper, eq. 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from signvote.core.update import HALVES, step_each_
from signvote.engines.ddp.placement import Part
from signvote.engines.ddp.torch_names import copy_all_, local_of, sharding_of
from signvote.kernels import Planes, backend


class Setting(NamedTuple):
    """How a parameter steps."""

    lr: float
    decay: float


class Alike(NamedTuple):
    """Parameters of one setting."""

    group: int
    targets: list[Tensor]  # parameters or masters
    begins: list[int]  # of the decision on each


class Stepping:
    """The parameters of this rank. Those of 16 bits have a master in float32, which steps in their place.

    A step of 1e-3 does not change a bfloat16 of 1: the nearest larger one is 1.0078.

    Args:
        parameters: in the order of the layout.
        parts: where each lies in the flat vector.
        groups: the place of each one's settings; None: each has its own.

    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        parts: Sequence[Part],
        groups: Sequence[int] | None = None,
    ) -> None:
        self.masters: dict[int, Tensor] = {}  # by the place of the parameter
        self._parameters = parameters
        self._parts = parts
        self._groups = range(len(parameters)) if groups is None else groups
        self._is_sharded = any(sharding_of(parameter) is not None for parameter in parameters)
        self._known: tuple[list[bool], list[int]] | None = None  # what `_together` was made for
        self._together: list[Alike] = []
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
        if place not in self.masters:
            return
        value = self._local(place) if master is None else local_of(master)
        self.masters[place].copy_(value)

    def step(
        self,
        decision: Planes,
        used: Sequence[bool],
        settings: Sequence[Setting],
        is_decided: bool | Tensor = True,
    ) -> None:
        """Step the parameters that some rank has a gradient of.

        Args:
            decision: on the flat vector.
            used: which parameters have a gradient on some rank.
            settings: of each parameter's group.
            is_decided: False: no parameter moves. A tensor: the device knows, and the decision has no signs if not.

        """
        if is_decided is False:
            return
        self._follow()
        if decision.signs.device.type == "cpu" and is_decided is True:
            self._step_each(decision, used, settings)
        else:
            self._step_at_once(decision, used, settings, is_decided)
        stepped = [place for place in self.masters if used[place]]
        parameters = [self._local(place) for place in stepped]
        masters = [self.masters[place] for place in stepped]
        copy_all_(parameters, masters)
        self._versions = self._versions_now()

    def _places(self, used: Sequence[bool]) -> list[int]:
        """The places of the parameters that step; a part without coordinates has nothing to step."""
        found = []
        for place, part in enumerate(self._parts):
            has_coordinates = part.start < part.stop
            if used[place] and has_coordinates:
                found.append(place)
        return found

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

    def _step_each(self, decision: Planes, used: Sequence[bool], settings: Sequence[Setting]) -> None:
        """One parameter after the other: on a CPU a launch costs nothing."""
        for alike in self._alike(used, settings):
            lr, decay = settings[alike.group]
            targets = zip(self._here(alike), alike.begins, strict=True)
            step_each_(targets, decision, lr, decay)

    def _here(self, alike: Alike) -> list[Tensor]:
        """The parts of these targets on this rank; FSDP2 may put them into other memory between two steps."""
        return [local_of(each) for each in alike.targets] if self._is_sharded else alike.targets

    def _step_at_once(
        self,
        decision: Planes,
        used: Sequence[bool],
        settings: Sequence[Setting],
        is_decided: bool | Tensor = True,
    ) -> None:
        """In few launches: all parameters of one lr and decay together."""
        decided = is_decided if isinstance(is_decided, Tensor) else None
        kernels = backend(decision.signs.device)
        for alike in self._alike(used, settings):
            lr, decay = settings[alike.group]
            needed = decided if decay else None  # without decay no decision, no step
            kernels.step_all_(self._here(alike), alike.begins, decision, lr, 1 - lr * decay, needed)

    def _alike(self, used: Sequence[bool], settings: Sequence[Setting]) -> list[Alike]:
        """The parameters that step together. Which ones, is worked out anew only when it changes."""
        first: dict[Setting, int] = {}
        merged = [first.setdefault(setting, group) for group, setting in enumerate(settings)]
        known = (list(used), merged)
        if self._known != known:
            self._known = known
            self._together = self._grouped(self._places(used), merged)
        return self._together

    def _grouped(self, places: Sequence[int], merged: Sequence[int]) -> list[Alike]:
        """These parameters by group; groups of equal settings are merged into their first."""
        found: dict[int, Alike] = {}
        for place in places:
            group = merged[self._groups[place]]
            alike = found.setdefault(group, Alike(group, [], []))
            alike.targets.append(self.masters.get(place, self._parameters[place]))
            alike.begins.append(self._parts[place].start)
        return list(found.values())
