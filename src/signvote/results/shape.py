"""The shape of a result: each entry has the type and the range that the reports rely on.

Files come from other people. `check_run` looks at every entry once, when a file is read, so that no other
module has to.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from signvote.errors import ConfigError, StateError
from signvote.metrics import USUAL, Metric, check_metrics, metrics_of
from signvote.settings import Settings

HINTS = get_type_hints(Settings)
NEEDED = ("task", "rule", "batch_sizes", "seed")  # settings of every run
LARGEST = 2**63 - 1  # of an integer
LARGEST_FLOAT = 1e100  # so that sums of squares are still numbers
LONGEST = 20_000  # characters of a text, and of all settings together that are no lists
MOST_MACHINES = 1000  # that computed a run, one after the other
MOST_NOTICES = 100  # about the workers of a run
DEEPEST = 20  # of lists and dicts in each other

Check = Callable[[Any], bool]


def fits(value: Any, hint: Any) -> bool:
    """Whether a value from JSON or TOML is allowed for a setting of this type.

    >>> fits([4, 8], tuple[int, ...]), fits(True, int), fits(1, float), fits(None, str | None)
    (True, False, True, True)
    """
    origin = get_origin(hint)
    inside = get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, choice) for choice in inside)
    if origin is Literal:
        return value in inside
    if origin in (list, tuple):
        return isinstance(value, list) and all(fits(item, inside[0]) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


def check_run(run: dict[str, Any], what: str) -> None:
    """Raise a StateError that names the first entry of a run that is missing or wrong."""
    if not _is_plain(run):
        raise StateError(f"{what} has a number or a text that no run has; was the file edited?")
    missing = [name for name in ENTRIES if name not in run and name not in OPTIONAL]
    if missing:
        raise StateError(f"{what} lacks {', '.join(missing)}; was the file edited?")
    for name, is_right in ENTRIES.items():
        if name in run and not is_right(run[name]):
            raise StateError(f"{what} has a wrong {name!r}; was the file edited?")
    _check_settings(run["config"], what)
    _check_evaluations(run, what)
    _check_trust(run, what)


# ---- values --------------------------------------------------------------------------------------


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Whether all texts inside can be written, and all numbers can be added up."""
    if depth > DEEPEST:
        return False
    if isinstance(value, dict):
        names_are_texts = all(map(is_text, value))
        return names_are_texts and all(_is_plain(item, depth + 1) for item in value.values())
    if isinstance(value, list):
        return all(_is_plain(item, depth + 1) for item in value)
    if isinstance(value, str):
        return is_text(value)
    return not isinstance(value, int) or abs(value) <= LARGEST


def is_text(value: Any) -> bool:
    """A text of reasonable length that a terminal and a page can show."""
    return isinstance(value, str) and len(value) <= LONGEST and value.isprintable()


def _is_count(value: Any) -> bool:
    return fits(value, int) and 0 <= value <= LARGEST


def _is_number(value: Any) -> bool:
    """A number of a reasonable size. Not a number is allowed: JSON may have null or NaN for it."""
    if value is None:
        return True
    return fits(value, float) and not LARGEST_FLOAT < abs(value) < math.inf


def _is_accuracy(value: Any) -> bool:
    return fits(value, float) and 0 <= value <= 1


def _is_loss(value: Any) -> bool:
    return _is_number(value) and value != -math.inf


def _is_share(value: Any) -> bool:
    if value is None:
        return True
    return fits(value, float) and (math.isnan(value) or 0 <= value <= 1)


def _is_time(value: Any) -> bool:
    return fits(value, float) and 0 <= value <= LARGEST_FLOAT


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _table_of(**checks: Check) -> Check:
    """A check for lists of equal lengths, by name. None at all are right, too: nothing was measured."""

    def is_right(value: Any) -> bool:
        if value == {}:
            return True
        if not isinstance(value, dict) or not all(name in value for name in checks):
            return False
        for name, check in checks.items():
            is_column = _list_of(check)
            if not is_column(value[name]):
                return False
        lengths = {len(value[name]) for name in checks}
        return len(lengths) == 1

    return is_right


def _is_pair(value: Any) -> bool:
    """A value and how often it follows itself."""
    if not isinstance(value, list) or len(value) != 2:
        return False
    return all(map(_is_count, value))


def _is_machine(value: Any) -> bool:
    return isinstance(value, dict) and len(value) <= MOST_MACHINES


def _dict_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _rising(value: dict[str, Any]) -> bool:
    rounds = value.get("round", [])
    return all(a < b for a, b in pairwise(rounds))


def _is_evaluations(value: Any) -> bool:
    """Rounds, and a list of values for each metric."""
    if not isinstance(value, dict):
        return False
    metrics = dict.fromkeys(value.keys() - {"round"}, _is_loss)
    return _table_of(round=_is_count, **metrics)(value) and _rising(value)


def _is_metrics(value: Any) -> bool:
    """Descriptions of metrics, as `Metric.as_dict` writes them."""
    if not isinstance(value, list) or not all(map(_is_description, value)):
        return False
    try:
        check_metrics([Metric(**described) for described in value])
    except (ConfigError, TypeError):
        return False
    return True


def _is_description(value: Any) -> bool:
    """The entries of one metric that must have a type; `Metric` looks at the others."""
    if not isinstance(value, dict):
        return False
    if not isinstance(value.get("more_is_better", False), bool):
        return False
    return all(isinstance(value.get(name), str) for name in ("name", "unit"))


def _is_sign_error(value: Any) -> bool:
    return _table_of(round=_is_count, error=_is_share)(value) and _rising(value)


ENTRIES: dict[str, Check] = {
    "config": lambda value: isinstance(value, dict),
    "status": lambda value: value in ("done", "interrupted"),
    "coordinates": lambda value: _is_count(value) and value > 0,
    "evaluations": _is_evaluations,
    "metrics": _is_metrics,
    "machine": lambda value: _list_of(_is_machine)(value) and len(value) <= MOST_MACHINES,
    "seconds": _dict_of(_is_time),
    "voters": _list_of(_is_pair),
    "bytes_up": _list_of(_is_pair),
    "bytes_down": _list_of(_is_pair),
    "trust": _table_of(round=_is_count, weight=_list_of(_is_number), overruled=_list_of(_is_share)),
    "sign_error": _is_sign_error,
    "versions": _dict_of(lambda value: isinstance(value, str)),
    "rounds_done": _is_count,
    "accuracy_by_class": _list_of(_is_share),
    "undecided": _is_count,
    "notices": lambda value: _list_of(is_text)(value) and len(value) <= MOST_NOTICES,
    "data": _dict_of(is_text),
}
OPTIONAL = (
    "metrics",
    "trust",
    "sign_error",
    "versions",
    "rounds_done",
    "accuracy_by_class",
    "undecided",
    "notices",
    "data",
)


# ---- entries that depend on each other -----------------------------------------------------------


def _check_settings(config: dict[str, Any], what: str) -> None:
    missing = [name for name in NEEDED if config.get(name) in (None, [])]
    if missing:
        names = ", ".join(f"config.{name}" for name in missing)
        raise StateError(f"{what} lacks {names}; was the file edited?")
    for name, value in config.items():
        if name in HINTS and value is not None and not fits(value, HINTS[name]):
            raise StateError(f"{what} has a wrong setting {name} = {value!r:.80}; was the file edited?")
    short = {name: value for name, value in config.items() if not isinstance(value, list)}
    if len(json.dumps(short)) > LONGEST:
        raise StateError(f"{what} has settings of more than {LONGEST:,} characters; was the file edited?")
    for name in ("mode", "workers", "rounds", "evaluate_every"):
        value = config.get(name)
        if value is not None and value < 0:
            raise StateError(f"{what} has a wrong setting {name} = {value}; was the file edited?")
    if not config["batch_sizes"]:
        raise StateError(f"{what} has no workers: its batch_sizes are empty; was the file edited?")


def _check_evaluations(run: dict[str, Any], what: str) -> None:
    """Each metric has values. An accuracy is a share."""
    found = run["evaluations"]
    if not found:
        return
    metrics = metrics_of(run)
    shares = found.get("accuracy", []) if metrics == USUAL else []
    is_complete = all(metric.name in found for metric in metrics)
    if not is_complete or not all(map(_is_accuracy, shares)):
        raise StateError(f"{what} has a wrong 'evaluations'; was the file edited?")


def _check_trust(run: dict[str, Any], what: str) -> None:
    """Each round of trust has a value for each worker, and each worker has a batch size."""
    trust = run.get("trust")
    if not trust:
        return
    workers = trust.get("workers")
    most = len(run["config"]["batch_sizes"])
    rows = [*trust["weight"], *trust["overruled"]]
    fits_workers = _are_workers(workers, most) and all(len(row) == len(workers) for row in rows)
    if not fits_workers:
        raise StateError(f"{what} has a 'trust' that does not fit its workers; was the file edited?")


def _are_workers(value: Any, most: int) -> bool:
    """A list of workers, of which there is one at least."""
    if not isinstance(value, list) or not value:
        return False
    return all(_is_count(worker) and worker < most for worker in value)
