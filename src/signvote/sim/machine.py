"""The device and the precision of a run: the torch settings that make it reproducible.

On a CPU, gradients use one thread. The way in which torch splits a convolution's sums among threads changes
their last bits, and a run must not depend on the number of cores. On a GPU, signvote's sums have a fixed order
and cuDNN must choose deterministic algorithms, so a run repeats bit for bit on the same kind of GPU with the
same versions.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from signvote import __version__
from signvote.errors import ConfigError
from signvote.names import check_name

Precision = Literal["float32", "tf32", "bf16"]


def versions() -> dict[str, str]:
    """The versions of signvote, torch and Python."""
    return {
        "signvote": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A device and the precision of its matrix products.

    Args:
        device: "cpu", "cuda" or "cuda:1".
        precision: precision of products on a GPU; sums, parameters and voted signals stay float32.
            "float32": exact. "tf32": inputs rounded to 11 bits, the default of PyTorch for convolutions and
            so of the authors. "bf16": activations rounded to 8 bits as well.
        together: compute all workers' gradients in one pass, without writing ballots as bytes. Default: on a
            GPU only.

    """

    device: str = "cpu"
    precision: Precision = "tf32"
    together: bool | None = None

    def __post_init__(self) -> None:
        check_name("precision", self.precision, get_args(Precision))
        try:
            kind = torch.device(self.device).type
        except RuntimeError:
            kind = ""
        if kind not in ("cpu", "cuda"):
            raise ConfigError(f"device is {self.device!r}; it must be cpu, cuda or cuda:NUMBER")
        if kind == "cuda":
            self._check_gpu()

    def _check_gpu(self) -> None:
        device = self.torch_device
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            has = f"has {count} GPUs" if count else "finds no GPU here"
            raise ConfigError(f"device is {self.device!r}; this PyTorch, {torch.__version__}, {has}")
        if self.precision == "bf16":
            self._check_bf16()

    def _check_bf16(self) -> None:
        """Not called for other precisions, because it initializes CUDA."""
        capability = torch.cuda.get_device_capability(self.torch_device)
        if capability < (8, 0):
            name = torch.cuda.get_device_name(self.torch_device)
            raise ConfigError(f"precision is 'bf16'; {name} is too old for it, use float32 or tf32")

    @property
    def torch_device(self) -> torch.device:
        """The device as a torch object."""
        return torch.device(self.device)

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.torch_device.type == "cuda"

    @property
    def is_together(self) -> bool:
        """Whether all workers compute in one pass, if the model allows it."""
        return self.on_gpu if self.together is None else self.together

    @property
    def dtype(self) -> torch.dtype:
        """The type of activations."""
        halved = self.on_gpu and self.precision == "bf16"
        return torch.bfloat16 if halved else torch.float32

    def named(self) -> dict[str, str]:
        """The device and the precision as results show them."""
        if not self.on_gpu:
            return {"device": "cpu", "precision": "float32"}
        name = torch.cuda.get_device_name(self.torch_device)
        return {"device": name, "precision": self.precision}

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Set up torch for the run and restore its settings afterwards."""
        threads = torch.get_num_threads()
        products = torch.get_float32_matmul_precision()
        rounded = self.precision != "float32"
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("high" if rounded else "highest")
        convolutions = torch.backends.cudnn.flags(
            enabled=True,
            benchmark=False,
            deterministic=True,
            allow_tf32=rounded,
        )
        try:
            with convolutions:
                yield
        finally:
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(products)
