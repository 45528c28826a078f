"""Samples of a task: tensors in memory, or whatever a map-style data set returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import default_collate

from signvote.errors import ConfigError

Nested = Any  # a tensor, or a tuple, list or dict of such
CPU = torch.device("cpu")


class Batch(NamedTuple):
    """Some samples, as a model and a loss receive them. The first dimension of every tensor counts the samples."""

    inputs: Nested
    labels: Nested = None  # None: the task has no labels

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The same structure with every tensor changed."""
        return Batch(mapped(change, self.inputs), mapped(change, self.labels))


class Samples(ABC):
    """Training or test data: samples by number."""

    is_in_memory: ClassVar = False  # whether `batch` needs tensors on the device only, and no value of theirs

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, indices: Tensor, draws: Tensor | None = None) -> Batch:
        """The samples with these indices, which lie on the device of the data.

        Args:
            indices: (n,) int64.
            draws: the result of `draw`, in training; None: no random change.

        """

    @abstractmethod
    def to(self, device: torch.device) -> Samples:
        """The same samples, whose batches lie on a device."""

    def draw(self, n: int, generator: torch.Generator) -> Tensor | None:
        """Random numbers that decide how `batch` draws n training samples; None: nothing is random."""
        return None

    @property
    def classes(self) -> Tensor | None:
        """The class of each sample, (n,) int64 from 0; None: the samples have no classes."""
        return None


@dataclass(frozen=True, kw_only=True, eq=False)
class Data(Samples):
    """Samples that fit into memory: inputs, and their labels if there are any.

    >>> house = {"size": torch.rand(100, 1), "place": torch.randint(7, (100,))}
    >>> len(Data(inputs=house, labels=torch.rand(100, 1)))
    100
    """

    inputs: Nested  # a tensor (n, ...), or a tuple or dict of such. uint8 (n, C, H, W) are images to be normalized
    labels: Any = None  # likewise, of any type; None: the model needs none

    is_in_memory: ClassVar = True

    def __post_init__(self) -> None:
        inputs = [_rows(tensor) for tensor in tensors(self.inputs, "inputs")]
        labels = [_rows(tensor) for tensor in tensors(self.labels, "labels")]
        counts = inputs + labels
        if not inputs or len(set(counts)) > 1 or not counts[0]:
            words = [f"{_counted(inputs)} inputs"]
            if labels:
                words.append(f"{_counted(labels)} labels")
            raise ConfigError(f"{' and '.join(words)}; they must be as many, at least 1")

    def __len__(self) -> int:
        first, *_ = tensors(self.inputs, "inputs")
        return first.shape[0]

    def batch(self, indices: Tensor, draws: Tensor | None = None) -> Batch:
        """See Samples."""
        return Batch(self.inputs, self.labels).mapped(lambda tensor: tensor[indices])

    def to(self, device: torch.device) -> Data:
        """See Samples."""
        inputs, labels = Batch(self.inputs, self.labels).mapped(lambda tensor: tensor.to(device))
        return Data(inputs=inputs, labels=labels)

    @property
    def classes(self) -> Tensor | None:
        """See Samples: labels (n,) of any integer type, none of them negative."""
        return _classes(self.labels)

    def wrong(self, labels: Tensor) -> Tensor:
        """K - 1 - y for labels y of K classes: the labels of a worker with flipped labels."""
        last: Tensor = self.labels.max()
        return last - labels


class MapStyle(Protocol):
    """A map-style data set, as `torch.utils.data.Dataset` describes it: it has a length, and samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Items(Samples):
    """Samples of a map-style data set. A sample is a pair (inputs, label), or inputs alone: a tensor or a dict.

    Args:
        dataset: read sample by sample, on the CPU.
        collate: makes tensors of a list of samples; default: PyTorch's.
        device: where batches go.

    """

    def __init__(
        self,
        dataset: MapStyle,
        collate: Callable[[list[Any]], Any] = default_collate,
        device: torch.device = CPU,
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.device = device
        if not len(dataset):
            raise ConfigError("the data set has 0 samples; it must have at least 1")
        _inputs_and_label(dataset[0])

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Tensor, draws: Tensor | None = None) -> Batch:
        """See Samples."""
        samples = [self.dataset[i] for i in indices.tolist()]
        found = Batch(*_inputs_and_label(self.collate(samples)))
        return found.mapped(lambda tensor: tensor.to(self.device))

    def to(self, device: torch.device) -> Items:
        """See Samples."""
        return Items(self.dataset, self.collate, device)

    @cached_property
    def classes(self) -> Tensor | None:
        """See Samples. It reads the whole data set."""
        labels = []
        for i in range(len(self)):
            _, label = _inputs_and_label(self.dataset[i])
            if not _is_class(label):
                return None
            labels.append(label)
        return _classes(torch.as_tensor(labels))


def _is_class(label: object) -> bool:
    """Whether a label is one number, that of a class."""
    if isinstance(label, Tensor):
        return not label.ndim
    return isinstance(label, int)


def samples_of(data: Samples | MapStyle) -> Samples:
    """The samples of a map-style data set, or these samples themselves."""
    if isinstance(data, Samples):
        return data
    if not (isinstance(data, Sized) and hasattr(data, "__getitem__")):
        raise ConfigError(
            f"the data are {type(data).__name__}; wanted signvote.tasks.Data, or a data set with"
            " __len__ and __getitem__"
        )
    return Items(data)


def mapped(change: Callable[[Tensor], Tensor], nested: Nested) -> Nested:
    """The same structure with every tensor changed. What is no tensor stays.

    >>> mapped(lambda x: x + 1, {"a": torch.tensor(1), "b": [torch.tensor(2), "text"]})
    {'a': tensor(2), 'b': [tensor(3), 'text']}
    """
    if isinstance(nested, Tensor):
        return change(nested)
    if isinstance(nested, dict):
        return {name: mapped(change, inner) for name, inner in nested.items()}
    if isinstance(nested, tuple | list):
        return type(nested)([mapped(change, inner) for inner in nested])
    return nested


def tensors(nested: Nested, what: str) -> list[Tensor]:
    """All tensors of a structure; anything else is an error."""
    if nested is None:
        return []
    if isinstance(nested, Tensor):
        return [nested]
    if isinstance(nested, dict):
        nested = tuple(nested.values())
    if not isinstance(nested, tuple | list):
        raise ConfigError(
            f"{what} are {type(nested).__name__}; wanted a tensor, or a tuple or dict of tensors"
        )
    return [tensor for inner in nested for tensor in tensors(inner, what)]


def shapes(nested: Nested) -> str:
    """The shapes of a structure in words.

    >>> shapes((torch.zeros(2, 3), {"mask": torch.zeros(2)}))
    '((2, 3), {mask: (2,)})'
    """
    if isinstance(nested, Tensor):
        return str(tuple(nested.shape))
    if isinstance(nested, dict):
        inside = ", ".join(f"{name}: {shapes(inner)}" for name, inner in nested.items())
        return f"{{{inside}}}"
    if isinstance(nested, tuple | list):
        inside = ", ".join(map(shapes, nested))
        return f"({inside})"
    return "none" if nested is None else type(nested).__name__


def _inputs_and_label(sample: Any) -> tuple[Any, Any]:
    if not isinstance(sample, tuple | list):
        return sample, None
    if len(sample) != 2:
        raise ConfigError(
            f"a sample has {len(sample)} parts; wanted a pair (inputs, label), or inputs alone as a tensor or dict"
        )
    inputs, label = sample
    return inputs, label


def _rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.ndim else 0


def _counted(rows: Sequence[int]) -> str:
    """The number of rows of each tensor, once if they agree."""
    return " or ".join(dict.fromkeys(map(str, rows))) or "0"


def _classes(labels: Any) -> Tensor | None:
    if not isinstance(labels, Tensor) or labels.ndim != 1:
        return None
    if labels.is_floating_point() or labels.is_complex() or int(labels.min()) < 0:
        return None
    return labels.long()
