"""Text as a task: windows of bytes, and the standard library of the running Python as text that every machine has.

A sample is a sequence. Inputs are the bytes of a window, labels the bytes that follow each of them.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from signvote.errors import DataError
from signvote.names import check_name
from signvote.recipes import usual_recipe
from signvote.tasks.data import Batch, Samples
from signvote.tasks.gpt import GPTS
from signvote.tasks.losses import token_cross_entropy
from signvote.tasks.metrics import loss, perplexity
from signvote.tasks.task import Task

TEXT = "python-source"  # the task's name
END = b"\0"  # of a file
ONE_IN = 10  # files, by a digest of their path, is for the test
TEST_WINDOWS = 1024  # at most, evenly spaced
SEQUENCES_PER_PASS = 16
LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "pydoc_data",  # generated
}  # folders
GENERATED = ("_sysconfigdata",)  # beginnings of the names of files that an installation writes


class Windows(Samples):
    """Sequences of bytes: sample i begins at byte i * length, in training up to a length later.

    Args:
        text: bytes, uint8.
        length: of a sequence.
        spaced: at most so many samples, evenly spaced; None: all.

    """

    is_in_memory: ClassVar = True

    def __init__(self, text: Tensor, length: int, spaced: int | None = None) -> None:
        fitting = (len(text) - 1) // length
        if fitting < 2:
            raise DataError(f"a text of {len(text):,} bytes is too short for sequences of {length}")
        self.text = text
        self.length = length
        self.spaced = spaced
        self._count = fitting if spaced is None else min(spaced, fitting)
        self._every = fitting // self._count

    def __len__(self) -> int:
        return self._count

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """How far each window moves."""
        return torch.randint(self.length, (n,), generator=generator)

    def batch(self, indices: Tensor, draws: Tensor | None = None) -> Batch:
        """(n, length) int64 inputs, and as labels the bytes that follow."""
        device = self.text.device
        starts = indices.to(device) * (self._every * self.length)
        if draws is not None:
            last = len(self.text) - 1 - self.length
            starts = (starts + draws.to(device)).clamp_max(last)
        offsets = torch.arange(self.length + 1, device=device)
        sequences = self.text[starts[:, None] + offsets].long()
        return Batch(sequences[:, :-1], sequences[:, 1:])

    def to(self, device: torch.device) -> Windows:
        """See Samples."""
        return Windows(self.text.to(device), self.length, self.spaced)


@lru_cache(maxsize=1)
def python_source() -> tuple[Tensor, Tensor, dict[str, str]]:
    """Training text, test text and a description: the standard library of the running Python.

    All modules, without tests and generated files, in the order of their paths. A digest of its path sends each file to
    one of the two texts, so the split is the same wherever the same Python is installed.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    train: list[bytes] = []
    test: list[bytes] = []
    files = modules(folder)
    for name in files:
        text = (folder / name).read_bytes() + END
        (test if is_test(name) else train).append(text)
    if not (train and test):
        raise DataError(f"{folder} has {len(files)} modules of Python's standard library; they are the text")
    texts = b"".join(train), b"".join(test)
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text).digest())
    version = f"standard library of {platform.python_implementation()} {platform.python_version()}"
    about = {
        "text": f"{version}, {len(files):,} files, {sum(map(len, texts)):,} bytes",
        "sha256": digest.hexdigest(),
    }
    first, second = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts)
    return first, second, about


def modules(folder: Path) -> list[str]:
    """The names of all modules below a folder, relative to it, sorted."""
    found: list[str] = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        below = Path(place).relative_to(folder)
        found += [(below / name).as_posix() for name in files if _is_module(name)]
    return sorted(found)


def is_test(name: str) -> bool:
    """Whether a file is for the test."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % ONE_IN == 0


def _is_module(name: str) -> bool:
    return name.endswith(".py") and not name.startswith(GENERATED)


def text_task(model: str) -> Task:
    """The next byte of Python's source.

    Args:
        model: one of GPTS.

    """
    check_name("model", model, GPTS)
    make = GPTS[model]
    context = make.keywords["context"]
    train, test, about = python_source()
    return Task(
        name=TEXT,
        train=Windows(train, context),
        test=Windows(test, context, TEST_WINDOWS),
        model=make,
        loss=token_cross_entropy,
        metrics=(loss("nats/byte"), perplexity()),
        samples_per_pass=SEQUENCES_PER_PASS,
        about=about,
        recipe=usual_recipe(TEXT),
    )
