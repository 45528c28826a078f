"""Settings in words: batch sizes, and the settings in which two experiments differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any


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
