"""A row of words with a header, so that it is never taken for another one: cut, doubled, or of an old round or view.

magic and kind | epoch | round | sender | words and checksum        five words of 64 bits, then the content
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch
from torch import Tensor

MAGIC = 0x53564F54  # "SVOT"
WORDS = 5  # of a header


class Seal(NamedTuple):
    """What a header says."""

    kind: int  # of the exchange, see KINDS
    epoch: int
    round: int
    sender: int  # worker id


KINDS = {1: "votes", 2: "numbers"}
FAULTS = {
    0: "",
    1: "not a message of this program",
    2: "of another exchange",
    3: "of another view",
    4: "of another round",
    5: "of another sender",
    6: "of another length",
    7: "damaged",
}  # why a row is refused, by the number that travels


def sealed(seal: Seal, content: Tensor) -> Tensor:
    """The row of words for some content, which is words too."""
    words = content.contiguous().view(-1)
    header = torch.tensor(_fields(seal, words))
    return torch.cat([header, words])


def fault_of(row: Tensor, wanted: Seal) -> int:
    """What is wrong with a row, as a key of FAULTS; 0: nothing."""
    header = row[:WORDS].tolist()
    fields = _fields(wanted, row[WORDS:])
    for fault, (found, right) in enumerate(zip(header[1:4], fields[1:4], strict=True), 3):
        if header[0] == fields[0] and found != right:
            return fault
    if header[0] != fields[0]:
        return 2 if header[0] >> 32 == MAGIC else 1
    if header[4] != fields[4]:
        return 7 if header[4] >> 32 == fields[4] >> 32 else 6
    return 0


def _fields(seal: Seal, words: Tensor) -> list[int]:
    numbers = [MAGIC << 32 | seal.kind, seal.epoch, seal.round, seal.sender - 2**63]
    checksum = zlib.crc32(words.numpy().data, zlib.crc32(repr(numbers).encode()))
    return [*numbers, len(words) << 32 | checksum]
