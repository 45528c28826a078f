"""The hot loops, written once per device with the same names and the same bits.

`reference` is plain torch, slow and obvious: the oracle, and the fallback on other devices. `cpu` is numba.
`cuda` is Triton and never waits for the device. All work on *planes*: int64 words in which bit i of word w
belongs to coordinate 64 w + i. The memory of a plane is therefore exactly the little-endian bit string of
a ballot.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from signvote.errors import ConfigError

WORD = 64
BACKENDS = ("cpu", "cuda", "reference")
AMPERE = (8, 0)  # the oldest GPUs that have what the Triton kernels use; older ones use plain torch


class Planes(NamedTuple):
    """Signs of coordinates, one bit each: shape (words,), or (workers, words) for stacked votes."""

    signs: Tensor  # 1 = positive; 0 where there is no sign
    support: Tensor | None  # 1 = has a sign; None: every coordinate has one

    def map(self, change: Callable[[Tensor], Tensor]) -> Planes:
        """Both planes, changed alike."""
        support = None if self.support is None else change(self.support)
        return Planes(change(self.signs), support)


class Coin(NamedTuple):
    """A fair bit for every coordinate, a pure function of key and coordinate."""

    key: int  # of `signvote.core.bits.coin_for`
    first: int = 0  # the coordinate that bit 0 of a plane belongs to

    def after(self, n: int) -> Coin:
        """The same coin for a plane that starts n coordinates later."""
        return Coin(self.key, self.first + n)


class Coins(NamedTuple):
    """One coin for each row of a matrix."""

    keys: Tensor  # (rows,) int64, the bits of each key
    first: int = 0

    @classmethod
    def of(cls, coins: Sequence[Coin | None], device: torch.device | str) -> Coins | None:
        """These coins as a tensor, or None if there are none. All start at the same coordinate."""
        known = [coin for coin in coins if coin is not None]
        if not known:
            return None
        keys = torch.tensor([signed(coin.key) for coin in known])
        return cls(upload(keys, device), known[0].first)


def signed(word: int) -> int:
    """A uint64 as the int64 of the same bits, which torch wants."""
    magnitude = word & (2**64 - 1)
    sign = word & 2**63
    return magnitude - (sign << 1)


class CoordinateWeights(NamedTuple):
    """The weight of every worker at every coordinate, as tables indexed by its counter.

    Where worker m's counter is c, row tables[table_of[m]] holds -w(c) at c, +w(c) at sizes[m] + c, and
    0, for no vote, at 2 sizes[m].
    """

    counters: Tensor  # (words, slots, 64) uint16
    slots: Tensor  # (workers,) int64: where a worker's counters are; -1: the worker takes no part
    tables: Tensor  # (tables, longest) int32
    table_of: Tensor  # (workers,) int64
    sizes: Tensor  # (workers,) int32
    zero_is_symbol: bool  # what a missing sign adds to a counter: 2, not 1


class Backend(Protocol):
    """The functions of a kernel module. A trailing `_` means that the first argument is written to."""

    def sign_planes(self, x: Tensor, coin: Coin | Coins | None) -> tuple[Planes, bool | Tensor]:
        """Signs of a contiguous float vector, or of each row of a matrix, and whether all of it was finite.

        A zero gets the coin's bit, or without a coin no sign. A matrix needs Coins, one for each row.
        The second result stays on the device: a boolean for a vector on the CPU, else a tensor.
        """

    def unpack(self, plane: Tensor, n: int) -> Tensor:
        """The first n bits of a plane (..., words) as booleans (..., n)."""

    def vote_(
        self, out: Planes, votes: Planes, weights: Tensor, coin: Coin | None, span: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        """Decide coordinates span[0] to span[1] by sign(sum_m weights[m] Y[m]) (paper, eq. 3); leave other bits.

        A tally of zero, a tie, gets the coin's bit, or without a coin no sign. Returns, per worker, the
        votes that differ from the decision and the votes cast, both without ties.
        """

    def vote_by_coordinate_(
        self, out: Planes, votes: Planes, weights: CoordinateWeights, coin: Coin | None, n: int
    ) -> tuple[Tensor, Tensor]:
        """Decide n coordinates with a weight for each worker and coordinate.

        The counters are updated in the same pass (paper, eq. 4): +2 for a vote that differs from the decision, and
        where just one of both is missing +1, or +2 if `zero_is_symbol`. Returns the same counts as `vote_`.
        """

    def tally(self, votes: Planes, weights: Tensor, n: int) -> Tensor:
        """sum_m weights[m] Y[m] at n coordinates, (n,) int32: what `vote_` takes the sign of (paper, eq. 3)."""

    def disagreements(self, votes: Planes, n: int, others: Planes | None = None) -> tuple[Tensor, Tensor]:
        """On how many of n coordinates two workers differ, and on how many both voted.

        Pairs are those among M workers, (M, M), or of each with K others, (M, K).
        """

    def step_(self, x: Tensor, decision: Planes, begin: int, step: float, keep: float = 1.0) -> None:
        """x[i] <- keep * x[i] - step * decision[begin + i] for a contiguous float vector (paper, eq. 5)."""

    def step_all_(
        self,
        targets: Sequence[Tensor],
        begins: Sequence[int],
        decision: Planes,
        step: float,
        keep: float = 1.0,
        decided: Tensor | None = None,
    ) -> None:
        """Step many tensors, each from its own coordinate of the decision, in few launches.

        Where `decided`, a boolean on the device, is False, nothing is kept less: the decision has no signs then.
        """


def upload(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a small tensor from the CPU to a device without waiting for earlier work there."""
    if torch.device(device).type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def download(*tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Start an asynchronous copy to the CPU. Calling the result waits for the copy and for nothing else."""
    far = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    if not far:
        return lambda: tensors
    copies = tuple(_begun(tensor) for tensor in tensors)
    arrival = torch.cuda.Event()
    arrival.record(torch.cuda.current_stream(far[0].device))

    def arrived() -> tuple[Tensor, ...]:
        arrival.synchronize()
        return copies

    return arrived


def _begun(tensor: Tensor) -> Tensor:
    """Where the copy of a tensor arrives; one on the CPU is there."""
    if tensor.device.type == "cpu":
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def words_for(n: int) -> int:
    """The number of words that n bits fill."""
    return -(-n // WORD)


@cache
def has_triton() -> bool:
    """Whether kernels can be compiled for a GPU. PyTorch for Windows comes without Triton."""
    return find_spec("triton") is not None


@cache
def _fastest(device: torch.device) -> str:
    """The fastest kernels that a device can run. Those for GPUs are partly written in PTX."""
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda" or not has_triton() or torch.version.hip is not None:
        return "reference"
    capability = torch.cuda.get_device_capability(device)
    return "cuda" if capability >= AMPERE else "reference"


def backend_name(device: torch.device | str) -> str:
    """Which kernels a device gets; SIGNVOTE_KERNELS=reference forces the plain ones."""
    name = os.environ.get("SIGNVOTE_KERNELS") or _fastest(torch.device(device))
    if name not in BACKENDS:
        raise ConfigError(f"SIGNVOTE_KERNELS is {name!r}; it must be one of {', '.join(BACKENDS)}, or unset")
    return name


def backend(device: torch.device | str) -> Backend:
    """The kernels for a device."""
    return _kernels(backend_name(device))


@cache
def _kernels(name: str) -> Backend:
    return cast(Backend, import_module(f"signvote.kernels.{name}"))
