"""The table and the figure of a study of local steps.

    python -m studies.tables local studies/local-steps/results.json.gz
    python -m studies.local studies/local-steps/results.json.gz docs/local-steps.png

A row is a method in one population with one number of local steps: its loss at the end, and what a worker sends and
receives, in bytes per local step. The best loss of a population and number of local steps is bold.
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from paper.claims import table as markdown

from signvote.report.labels import batch_label
from signvote.results import Result, read, unpack

ORDER = ("weighted", "majority", "diloco", "sparseloco")
METRIC = "loss"
HEADS = ["workers x batch", "H", "method", "loss", "bytes up a step", "bytes down a step"]
Runs = list[Result]
Key = tuple[Any, ...]


def local(runs: Runs) -> str:
    """The table of losses and bytes."""
    lines = []
    for _, group in groupby(_experiments(runs), key=lambda seeds: _key(seeds[0])[:-1]):
        methods = list(group)
        best = min(map(loss_of, methods))
        lines += [_line(seeds, best) for seeds in methods]
    return markdown(HEADS, lines)


def _experiments(runs: Runs) -> list[Runs]:
    """The runs that differ in their seed alone, ordered by workers, local steps and method."""
    by_key: dict[Key, Runs] = {}
    for run in sorted(runs, key=_key):
        by_key.setdefault(_key(run), []).append(run)
    return list(by_key.values())


def _key(run: Result) -> Key:
    config = run["config"]
    sizes = config["batch_sizes"]
    is_unequal = len(set(sizes)) > 1
    return is_unequal, len(sizes), tuple(sizes), config["local_steps"], ORDER.index(config["rule"])


def _line(seeds: Runs, best: float) -> list[str]:
    config = seeds[0]["config"]
    text = f"{loss_of(seeds):.3f}"
    if len(seeds) > 1:
        text += f" ± {stdev(map(_last, seeds)):.3f}"
    if loss_of(seeds) == best:
        text = f"**{text}**"
    ways = [f"{per_step(seeds[0], way):,.0f}" for way in ("bytes_up", "bytes_down")]
    return [batch_label(config["batch_sizes"]), str(config["local_steps"]), config["rule"], text, *ways]


def loss_of(seeds: Runs) -> float:
    """The mean loss at the end."""
    return fmean(map(_last, seeds))


def _last(run: Result) -> float:
    return float(run["evaluations"][METRIC][-1])


def per_step(run: Result, way: str) -> float:
    """Bytes of a worker for each local step, up or down."""
    config = run["config"]
    sent = unpack(run[way])
    return float(sum(sent) / len(sent) / len(config["batch_sizes"]) / config["local_steps"])


# ---- the figure ----------------------------------------------------------------------------------

COLORS = {"weighted": "C0", "diloco": "C1", "sparseloco": "C2"}
LABELS = {"weighted": "votes", "diloco": "float32 (DiLoCo)", "sparseloco": "sparse, gathered (SparseLoCo)"}
LOCAL_STEPS = 30


def curve(seeds: Runs) -> tuple[list[float], list[float]]:
    """Megabytes of a worker, up and down, and the mean loss, at each evaluation after the start."""
    run = seeds[0]
    each = (per_step(run, "bytes_up") + per_step(run, "bytes_down")) * run["config"]["local_steps"] / 1e6
    rounds = run["evaluations"]["round"][1:]
    losses = [
        fmean(values) for values in zip(*(its["evaluations"][METRIC][1:] for its in seeds), strict=True)
    ]
    return [each * done for done in rounds], losses


def draw(runs: Runs, path: Path | str) -> None:
    """Loss by bytes, a panel for each number of equal workers."""
    import matplotlib.pyplot as plt

    equal = [seeds for seeds in _experiments(runs) if not _key(seeds[0])[0]]
    shown = [seeds for seeds in equal if seeds[0]["config"]["local_steps"] == LOCAL_STEPS]
    panels = [list(group) for _, group in groupby(shown, key=lambda seeds: _key(seeds[0])[1])]
    figure, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.6), squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        for seeds in panel:
            rule = seeds[0]["config"]["rule"]
            axis.plot(*curve(seeds), marker="o", markersize=3, color=COLORS[rule], label=LABELS[rule])
        axis.set_xscale("log")
        axis.set_title(f"{len(panel[0][0]['config']['batch_sizes'])} workers, H = {LOCAL_STEPS}")
        axis.set_xlabel("MB of a worker, up and down")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("test loss, nats per byte")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    """Draw the figure of a results file."""
    if len(sys.argv) != 3:
        sys.exit("usage: python -m studies.local RESULTS.json FIGURE.png")
    _, path, figure = sys.argv
    draw([run for run in read(path)["runs"] if run["status"] == "done"], figure)


if __name__ == "__main__":
    main()
