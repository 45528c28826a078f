"""What travels between server and node: plain records of a Flower message, nothing pickled.

down    "signvote"   ConfigRecord   round, worker, the settings of worker and vote, the steps of the decisions
        "decisions"  ArrayRecord    round -> the packed decision, those that the node lacks; or
        "model"      ArrayRecord    the whole model after round `model_round`, where that is smaller
        "config"     ConfigRecord   the user's own
up      "signvote"   ConfigRecord   applied: the last round in the node's model, -1: send me the model
        "ballot"     ArrayRecord    the packed ballot
        "metrics"    MetricRecord   loss, num-examples
"""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

ORDER, DECISIONS, MODEL, CONFIG = "signvote", "decisions", "model", "config"
STATUS, BALLOT, METRICS = "signvote", "ballot", "metrics"
STYPE = "signvote.ballot"  # how an Array with packed votes says that it is no numpy array
NOTHING = -1  # the `applied` of a node that needs the whole model


def to_array(message: bytes) -> Array:
    """A ballot or decision as Flower carries it: the very bytes."""
    return Array("uint8", (len(message),), STYPE, message)


def ballot_in(content: RecordDict) -> bytes | None:
    """The ballot in a reply, unread; None: there is none."""
    array = content.array_records.get(BALLOT, ArrayRecord()).get(BALLOT)
    return None if array is None else array.data


def applied_in(content: RecordDict) -> int:
    """The last round that a node says its model has."""
    applied = content.config_records.get(STATUS, ConfigRecord()).get("applied")
    return applied if isinstance(applied, int) else NOTHING


def loss_in(content: RecordDict) -> float | None:
    """The loss that a node reports, if it is a number."""
    loss = content.metric_records.get(METRICS, MetricRecord()).get("loss")
    return float(loss) if isinstance(loss, int | float) else None
