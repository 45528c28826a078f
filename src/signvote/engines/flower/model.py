"""The model that the server keeps: it steps by each decision, as the models of the nodes do."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flwr.app import ArrayRecord
from torch import Tensor

from signvote.core.ballot import Ballot
from signvote.core.groups import Factors, checked
from signvote.core.layout import Layout
from signvote.core.update import apply_decision
from signvote.engines.flower.buffers import buffers_of
from signvote.errors import LayoutError

Step = float | Callable[[int], float]


class ServerModel:
    """A model, and how it steps.

    Args:
        layout: of the parameters that are voted on.
        step: size of the step, or a function of the round, from 1.
        decay: weight decay.
        factors: what the step and the decay of a parameter are multiplied by, by name.

    """

    def __init__(
        self,
        layout: Layout,
        *,
        step: Step,
        decay: float,
        factors: Mapping[str, Factors] | None,
    ) -> None:
        self.layout = layout
        self.step = step
        self.decay = decay
        self.factors = checked(factors, [segment.name for segment in layout.segments])
        self.tensors: dict[str, Tensor] = {}

    def load(self, model: Mapping[str, Tensor]) -> None:
        """Copy a model. Workers vote only on the tensors that the layout names."""
        names = [segment.name for segment in self.layout.segments]
        missing = [name for name in names if name not in model]
        if missing:
            raise LayoutError(f"the initial arrays lack {', '.join(missing)}; wanted {self.layout!r}")
        voted = [(name, model[name]) for name in names]
        if Layout(voted) != self.layout:
            raise LayoutError(f"the initial arrays have other shapes; wanted {self.layout!r}")
        self.tensors = {name: tensor.clone() for name, tensor in model.items()}

    def arrays(self) -> ArrayRecord:
        """The model as Flower sends it."""
        return ArrayRecord(self.tensors)

    def apply(self, decision: Ballot) -> float:
        """Step by the decision of a round. Returns the size of the step."""
        size = self.step(decision.round) if callable(self.step) else self.step
        step = float(size)
        apply_decision(self.tensors, decision, step, self.decay, self.factors)
        return step

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The tensors that are not voted on, but reported by nodes."""
        return buffers_of(self.tensors, self.layout)
