"""A tracker of one's own: a run's accuracy, bytes and trust as lines of JSON, written while it trains.

    python examples/tracker.py                # some seconds
    python examples/tracker.py --rounds 10    # the small form
    tail -f runs/tracker/log.jsonl            # meanwhile, elsewhere

A tracker is any object with `start`, `log` and `finish` (`signvote.sim.Tracker`). Put the calls of your own tool there.
TensorBoard, Weights & Biases and MLflow come with signvote: `--tensorboard`, `--wandb` and `--mlflow` of a command.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from signvote.sim import Config, train
from signvote.tasks import load_task


class JsonLines:
    """Appends one line per event to a file; a resumed run appends to the same file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self, config: dict[str, Any], round: int) -> None:
        self._write(event="start", round=round, config=config)

    def log(self, round: int, scalars: dict[str, float], trust: dict[str, list[float]]) -> None:
        self._write(event="log", round=round, **scalars, **trust)

    def finish(self, result: dict[str, Any]) -> None:
        self._write(event="finish", round=result["rounds_done"], status=result["status"])

    def _write(self, **event: Any) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(event) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("runs/tracker"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "log.jsonl"
    log.unlink(missing_ok=True)

    config = Config(
        task="mnist-10k", model="mlp", rule="weighted", batch_sizes=(4, 4, 4, 64), rounds=options.rounds,
        evaluate_every=max(1, options.rounds // 5),
    )  # fmt: skip
    train(config, load_task("mnist-10k", model="mlp"), options.out, trackers=[JsonLines(log)])

    for line in log.read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "log":
            weights = ", ".join(f"{w:.1f}" for w in event.get("weight", []))  # none before the first vote
            print(f"round {event['round']:>4}: {event['accuracy']:.1%}, {event['bytes_up']:>9,} bytes up,",
                  f"weights {weights or 'not yet known'}")  # fmt: skip
    print(f"the lines: {log}")


if __name__ == "__main__":
    main()
