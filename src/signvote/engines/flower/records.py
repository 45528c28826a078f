"""The records of a Flower message between server and node. Nothing is pickled.

down    "signvote"   ConfigRecord   round, worker, the settings of worker and vote, the steps of the decisions
        "decisions"  ArrayRecord    round -> the packed decision, for each round that the node lacks; or
        "model"      ArrayRecord    the whole model after round `model_round`, where that is smaller
        "config"     ConfigRecord   the user's own settings
up      "signvote"   ConfigRecord   applied: the last round in the node's model, -1: send me the model
        "ballot"     ArrayRecord    the packed ballot
        "metrics"    MetricRecord   loss, num-examples
        "buffers"    ArrayRecord    name -> float32 numbers, for each floating-point buffer, if the server asks
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from signvote.core.groups import USUAL, Factors

Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord)

# Keys of a message from the server.
INSTRUCTION = "signvote"
DECISIONS = "decisions"
MODEL = "model"
CONFIG = "config"

# Keys of a reply from a node.
STATUS = "signvote"
BALLOT = "ballot"
METRICS = "metrics"
BUFFERS = "buffers"

STYPE = "signvote.ballot"  # marks an Array of packed votes, which numpy cannot read
BUFFER_STYPE = "signvote.buffer"  # marks an Array of plain little-endian float32
FACTORS = (
    "factors-of",
    "step-factors",
    "decay-factors",
)  # lists in an instruction: names, and two numbers each
NOTHING = -1  # `applied` of a node that needs the whole model


def to_array(message: bytes) -> Array:
    """Wrap the bytes of a ballot or decision, unchanged, as Flower's Array."""
    return Array("uint8", (len(message),), STYPE, message)


def to_buffer(tensor: Tensor) -> Array:
    """The numbers of a buffer as little-endian float32: a length says all that there is to check."""
    numbers = tensor.detach().float().cpu().numpy().astype("<f4")
    return Array("float32", numbers.shape, BUFFER_STYPE, numbers.tobytes())


def as_lists(factors: Mapping[str, Factors]) -> dict[str, list[Any]]:
    """Factors of parameters as a ConfigRecord can hold them; nothing for the usual ones."""
    unusual = {name: its for name, its in factors.items() if its != USUAL}
    columns = zip(*((name, *its) for name, its in unusual.items()), strict=True)
    return dict(zip(FACTORS, map(list, columns), strict=True)) if unusual else {}


def from_lists(instruction: Mapping[str, Any]) -> dict[str, Factors]:
    """The factors in an instruction."""
    names, steps, decays = (instruction.get(key, []) for key in FACTORS)
    return {name: Factors(step, decay) for name, step, decay in zip(names, steps, decays, strict=True)}


def record_in(content: RecordDict, name: str, kind: type[Record]) -> Record:
    """A record of a reply; an empty one if the reply has none of this kind.

    `content.array_records` and its like would keep the whole reply in memory until the next garbage collection.
    """
    found = content.get(name)
    return found if isinstance(found, kind) else kind()


def ballot_in(content: RecordDict) -> bytes | None:
    """The ballot in a reply, not parsed; None if the reply has no ballot."""
    array = record_in(content, BALLOT, ArrayRecord).get(BALLOT)
    return None if array is None else array.data


def applied_in(content: RecordDict) -> int:
    """The last round in the node's model, as the node reports it."""
    applied = record_in(content, STATUS, ConfigRecord).get("applied")
    return applied if isinstance(applied, int) else NOTHING


def is_vote(content: RecordDict) -> bool:
    """Whether a reply counts as a vote: a node that asks for the whole model need not send a ballot."""
    return BALLOT in content or applied_in(content) != NOTHING
