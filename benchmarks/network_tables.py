"""The tables of docs/slow-links.md, from the results of `network.py`.

python -m benchmarks.network_tables
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.network import FOLDER, name_of
from benchmarks.network_methods import METHODS, SPEED_ONLY
from benchmarks.network_target import chosen, steps_to_target

LINKS = (0, 1000, 100, 10, 1)
ALIKE = {"fp16": "float32"}  # whose steps a method takes where its own were not measured
NAMES = {
    "float32": "DDP, float32",
    "fp16": "DDP, fp16 hook",
    "powersgd-1": "PowerSGD, rank 1",
    "powersgd-2": "PowerSGD, rank 2",
    "powersgd-4": "PowerSGD, rank 4",
    "local-8": "float32 averages, every 8 steps",
    "local-32": "float32 averages, every 32 steps",
    "vote": "`Vote`",
    "sparse": "`Vote`, `top`, feedback",
    "vote-8": "`LocalVote`, every 8 steps",
    "vote-32": "`LocalVote`, every 32 steps",
}


def measured(results: dict[str, Any], method: str) -> dict[int, dict[str, Any]]:
    """What a method took on each link."""
    found = {mbit: results["links"].get(str(mbit), {}).get("methods", {}).get(method) for mbit in LINKS}
    return {mbit: each for mbit, each in found.items() if each is not None}


def number(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.3f}"


def row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def table(results: dict[str, Any], *, to_target: bool) -> str:
    """Seconds to the target, or of a step, by link; the least of each link in bold."""
    heads = ["method", "setting", "steps", "MB up"] if to_target else ["method", "kB up a step"]
    lines = [
        row(heads + [name_of(mbit) for mbit in LINKS]),
        "|---" * 1 + "|---:" * (len(heads) - 1 + len(LINKS)) + "|",
    ]
    seconds: dict[str, dict[int, float]] = {}
    fronts: dict[str, list[str]] = {}
    for method in (m for m in METHODS if m not in SPEED_ONLY):
        here = measured(results, method)
        counted = method if steps_to_target(results["curves"], method) else ALIKE.get(method, method)
        steps = steps_to_target(results["curves"], counted)
        if not here or (to_target and steps is None):
            continue
        sent = sum(each["bytes_up"] for each in here.values()) / len(here)
        fronts[method] = [NAMES[method], f"{sent / 1e3:,.0f}" if sent > 1e4 else f"{sent / 1e3:.1f}"]
        factor = 1.0
        if to_target:
            assert steps is not None
            factor = steps[0]
            setting = ", ".join(
                f"{key} {value:g}" for key, value in (chosen(results["curves"], counted) or {}).items()
            )
            reached = f"{steps[0]:g} ({steps[1]}-{steps[2]})"
            fronts[method] = [NAMES[method], setting, reached, f"{sent * factor / 1e6:,.1f}"]
        seconds[method] = {mbit: factor * each["seconds"] for mbit, each in here.items()}
    for method, front in fronts.items():
        cells = []
        for mbit in LINKS:
            own = seconds[method].get(mbit)
            best = min((each[mbit] for each in seconds.values() if mbit in each), default=None)
            text = "" if own is None else number(own)
            cells.append(f"**{text}**" if own is not None and own == best else text)
        lines.append(row(front + cells))
    return "\n".join(lines)


def main() -> None:
    for name in ("mnist", "gpt"):
        results = json.loads((FOLDER / f"{name}.json").read_text())
        print(f"\n{name}: seconds to {results['target']}\n")
        print(table(results, to_target=True))
        print(f"\n{name}: seconds a step\n")
        print(table(results, to_target=False))
        for mbit in LINKS:
            carried = results["links"].get(str(mbit), {}).get("carried")
            if carried:
                uses = {
                    m: round(each["link_use_in_optimizer"], 2)
                    for m in METHODS
                    if (each := measured(results, m).get(mbit)) and m.startswith(("vote", "sparse"))
                }
                print(f"\n{name_of(mbit)} carried {carried / 1e6:.3f} MB/s; used in the optimizer: {uses}")
        for end in results.get("ends", []):
            product = f"{end['steps']} steps, {end['seconds']:.0f} s; product {end['product']:.0f} s"
            print(f"\n{name_of(end['link'])}, {end['method']}: {product}")


if __name__ == "__main__":
    main()
