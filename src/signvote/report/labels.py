"""Settings in words: batch sizes, and the settings in which two experiments differ."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from signvote.settings import SETTINGS, unusual


def batch_label(sizes: Sequence[int]) -> str:
    """Batch sizes in a few words.

    >>> batch_label([904, 4, 4]), batch_label([1, 2, 3, 4])
    ('2 x 4 + 1 x 904', '4 workers, batch 1 to 4')
    """
    counts = sorted(Counter(sizes).items())
    if len(counts) > 3:
        smallest, _ = counts[0]
        largest, _ = counts[-1]
        return f"{len(sizes)} workers, batch {smallest} to {largest}"
    parts = [f"{count} x {size}" for size, count in counts]
    return " + ".join(parts)


def setting_label(key: str, value: Any) -> str:
    """A setting in words; empty if it is off.

    >>> setting_label("options", {"cap": 2.0, "per": "tensor"})
    'cap 2.0, per tensor'
    >>> setting_label("feedback", True), setting_label("top", None)
    ('feedback', '')
    """
    if key == "batch_sizes":
        return batch_label(value)
    if isinstance(value, dict):
        labels = [setting_label(name, inner) for name, inner in value.items()]
        return ", ".join(labels)
    if value is None or value is False:
        return ""
    if value is True:
        return key
    return f"{key} {value}"


def attackers_of(settings: Mapping[str, Any]) -> set[int]:
    """The workers that attack, at least in some rounds: the last ones, as many as the setting says.

    >>> attackers_of({"attack": "flip=0.3:2:100", "batch_sizes": [4, 4, 8]}), attackers_of({"batch_sizes": [4, 4]})
    ({1, 2}, set())
    """
    workers = len(settings["batch_sizes"])
    attack = str(settings.get("attack") or "")
    _, _, after_name = attack.partition(":")
    number, _, _ = after_name.partition(":")
    count = int(number) if number.isdecimal() else 0
    first = max(0, workers - count)
    return set(range(first, workers))


def train_command(settings: Mapping[str, Any]) -> list[str]:
    """The command that repeats a run, with a flag for each setting that is not at its default.

    >>> train_command({"task": "mnist", "rule": "robust", "mode": 4, "seed": 0, "top": 0.1, "feedback": True})
    ['signvote', 'train', '--task', 'mnist', '--rule', 'robust', '--mode', '4', '--top', '0.1', '--feedback']
    """
    line = ["signvote", "train"]
    implied = _implied(settings)
    shown = unusual(settings)
    if ":" in str(settings["task"]):  # the recipe that it has by itself is not known here
        shown = {"task": settings["task"], "recipe": settings["recipe"], **shown}
    for name, value in shown.items():
        if name in SETTINGS and name not in implied:
            flag = "--" + name.replace("_", "-")
            is_bare = value is True and SETTINGS[name].default is False
            line += [flag] if is_bare else [flag, *_arguments(value)]
    return line


def _implied(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The settings that others decide: batch sizes follow a mode, and the number of workers follows batch sizes."""
    has_mode = settings.get("mode") is not None
    return ("batch_sizes",) if has_mode else ("workers", "mode")


def _arguments(value: Any) -> list[str]:
    """What follows a flag."""
    if isinstance(value, dict):
        return [f"{key}={json.dumps(inner)}" for key, inner in value.items()]
    parts = value if isinstance(value, list) else [value]
    return [str(part) for part in parts]


def machine_label(stretches: Sequence[dict[str, Any]]) -> str:
    """Where a run was computed. A run that moved has a stretch of rounds for each machine.

    >>> moved = [{"from_round": 1, "device": "cpu"}, {"from_round": 9, "device": "cuda", "precision": "tf32"}]
    >>> machine_label(moved)
    'cpu, from round 9 cuda tf32'
    """
    texts: list[str] = []
    for stretch in stretches:
        given = (stretch.get("device"), stretch.get("precision"))
        text = " ".join(str(part) for part in given if part)
        if texts:
            text = f"from round {stretch.get('from_round')} {text}"
        texts.append(text)
    return ", ".join(texts)


def unique(items: Iterable[str]) -> list[str]:
    """The different items, in order of appearance."""
    return list(dict.fromkeys(items))
