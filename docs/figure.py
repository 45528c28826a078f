"""Draws docs/figure.png for the README and the home page: `python docs/figure.py`.

Plain voting and signvote's default rule under one recipe, from the committed results of the study on CIFAR-10.
"""

from __future__ import annotations

from pathlib import Path

from signvote.report import figure
from signvote.results import read, results_of

HERE = Path(__file__).parent
RESULTS = HERE.parent / "paper" / "fig1-cifar10" / "results.json.gz"


def main() -> None:
    """Draw the runs of signvote's own recipe."""
    runs = read(RESULTS)["runs"]
    tuned = [run for run in runs if run["config"]["recipe"] == "tuned"]
    figure(results_of(tuned), HERE / "figure.png")


if __name__ == "__main__":
    main()
