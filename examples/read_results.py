"""Reading results with pandas: who is best, by how much, and at what cost in bytes.

    python examples/read_results.py                                  # the paper's MNIST figure, as reproduced here
    python examples/read_results.py runs/demo                        # what `make demo` left
    python examples/read_results.py runs/demo --reach 0.9

`results.json` has everything of every run. `results.csv` beside it has a row per evaluation, for spreadsheets:
`pandas.read_csv` gives the same table as `table` below.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import pandas as pd  # type: ignore[import-untyped]

from signvote import results

ROOT = Path(__file__).parent.parent
SCENE = ["task", "recipe", "attack", "split"]


def table(path: Path) -> pd.DataFrame:
    """A row per evaluation: of which run, the round, accuracy, loss, bytes since the start."""
    text = results.to_csv(results.read(path))
    rows = pd.read_csv(io.StringIO(text), dtype=dict.fromkeys([*SCENE, "rule", "options"], str))
    modes = rows["mode"].map("mode {:.0f}".format)
    rows["batches"] = modes.where(rows["mode"].notna(), rows["batch_sizes"])
    rows[SCENE] = rows[SCENE].fillna("none")
    rows["rule"] += (" " + rows["options"]).fillna("")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, nargs="?", default=ROOT / "paper" / "fig1-mnist")
    parser.add_argument("--baseline", default="majority")
    parser.add_argument("--reach", type=float, default=0.95, help="an accuracy, 0 to 1")
    options = parser.parse_args()
    path = results.results_file(options.path) if options.path.is_dir() else options.path
    rows = table(path)
    scene = [name for name in SCENE if rows[name].nunique() > 1]  # what else differs between runs
    done = rows.loc[rows.groupby([*scene, "rule", "batches", "seed"])["round"].idxmax()]  # a row per run

    print("final test accuracy in %, mean over seeds")
    print(100 * done.pivot_table("accuracy", [*scene, "rule"], "batches"), "\n")

    by_seed = done.pivot_table("accuracy", [*scene, "batches", "seed"], "rule")  # a column per rule
    if options.baseline in by_seed and len(by_seed.columns) > 1:
        print(f"points more than {options.baseline}, of the same batches and seed: mean and spread")
        more = 100 * by_seed.sub(by_seed[options.baseline], axis=0).drop(columns=options.baseline)
        print(more.dropna(how="all").groupby([*scene, "batches"]).agg(["mean", "std"]), "\n")

    print(f"MB that all workers sent until {options.reach:.0%} was first reached, mean over seeds that did")
    there = rows[rows["accuracy"] >= options.reach]
    first = there.groupby([*scene, "rule", "batches", "seed"])["bytes_up"].min() / 1e6
    print(first.groupby([*scene, "rule", "batches"]).mean().unstack())


if __name__ == "__main__":
    pd.options.display.float_format = "{:.2f}".format
    main()
