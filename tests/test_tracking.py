"""Trackers hear of a run once, also when it goes on; TensorBoard's files hold what they should."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from signvote.errors import ConfigError
from signvote.sim import Config, MLflow, TensorBoard, WandB, trackers, train
from signvote.sim.compare import compare
from tests.test_formats import config, toy
from tests.test_sim import small


class Heard:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.starts: list[tuple[str, int]] = []
        self.logs: list[tuple[int, dict[str, float], dict[str, list[float]]]] = []
        self.ends: list[str] = []

    def start(self, config: dict[str, Any], round: int) -> None:
        self.starts.append((config["rule"], round))

    def log(self, round: int, scalars: dict[str, float], trust: dict[str, list[float]]) -> None:
        self.logs.append((round, scalars, trust))

    def finish(self, result: dict[str, Any]) -> None:
        self.ends.append(result["status"])


def test_a_tracker_hears_what_the_result_says(tmp_path: Path) -> None:
    heard, other = Heard(), Heard()
    result = train(config("weighted"), toy(), tmp_path, trackers=[heard, other])
    assert heard.starts == [("weighted", 0)]
    assert heard.ends == ["done"]
    assert heard.logs == other.logs
    measured = result["evaluations"]
    assert [round for round, *_ in heard.logs] == measured["round"]
    assert [scalars["accuracy"] for _, scalars, _ in heard.logs] == measured["accuracy"]
    assert [scalars["loss"] for _, scalars, _ in heard.logs] == measured["loss"]
    (_, first, nothing), *_, (_, last, trust) = heard.logs
    assert (first["bytes_up"], first["seconds"], nothing) == (0, 0.0, {})
    assert last["bytes_up"] == last["bytes_down"] == 8 * 3 * 69
    assert last["voters"] == 3
    assert last["seconds"] == pytest.approx(result["seconds"]["total"], rel=0.5)
    assert trust["weight"] == pytest.approx(result["trust"]["weight"][-1], rel=1e-5)
    assert trust["overruled"] == pytest.approx(result["trust"]["overruled"][-1], rel=1e-5)


def test_going_on_repeats_nothing(tmp_path: Path) -> None:
    heard = Heard()
    train(config("weighted"), toy(), tmp_path, trackers=[heard], watch=lambda run: run.round == 5)
    train(config("weighted"), toy(), tmp_path, trackers=[heard], resume=True)
    assert heard.starts == [("weighted", 0), ("weighted", 5)]
    assert [round for round, *_ in heard.logs] == [0, 2, 4, 6, 8]
    assert heard.ends == ["interrupted", "done"]


def test_yardsticks_have_no_trust_and_who_was_away_is_nan(tmp_path: Path) -> None:
    heard = Heard()
    common: dict[str, Any] = {"task": "toy", "batch_sizes": (2, 4, 8), "rounds": 2, "evaluate_every": 1}
    train(Config(rule="oracle", **common), toy(), tmp_path / "a", trackers=[heard])
    assert all(trust == {} for *_, trust in heard.logs)
    away = Heard()
    train(Config(rule="weighted", absent=("0:1:2",), **common), toy(), tmp_path / "b", trackers=[away])
    overruled = away.logs[-1][2]["overruled"]
    assert math.isnan(overruled[0])
    assert all(map(math.isfinite, overruled[1:]))


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    return EventAccumulator(str(folder), size_guidance={"histograms": 0}).Reload()


def test_tensorboard_holds_scalars_and_histograms(tmp_path: Path) -> None:
    """A run that was stopped and goes on is one run there."""
    board = TensorBoard(tmp_path)
    train(config("weighted"), toy(), tmp_path, trackers=[board], watch=lambda run: run.round == 5)
    result = train(config("weighted"), toy(), tmp_path, trackers=[board], resume=True)
    found = events(tmp_path)
    seen = [(e.step, e.value) for e in found.Scalars("accuracy")]
    measured = result["evaluations"]
    assert seen == [
        (r, pytest.approx(a)) for r, a in zip(measured["round"], measured["accuracy"], strict=True)
    ]
    assert {"loss", "voters", "bytes_up", "bytes_down", "seconds", "weight/worker 2"} <= set(
        found.Tags()["scalars"]
    )
    weights = found.Histograms("trust/weight")
    assert [e.step for e in weights] == [2, 4, 6, 8]
    assert weights[-1].histogram_value.num == 3
    assert weights[-1].histogram_value.sum == pytest.approx(sum(result["trust"]["weight"][-1]), rel=1e-4)


def test_every_run_of_a_comparison_has_its_own(tmp_path: Path) -> None:
    configs = [small(rounds=2, evaluate_every=1), small(rounds=2, evaluate_every=1, rule="majority")]
    compare(configs, tmp_path, trackers=[TensorBoard], jobs=1)
    folders = sorted((tmp_path / "runs").iterdir())
    assert [len(events(folder).Scalars("loss")) for folder in folders] == [3, 3]


@pytest.mark.parametrize("kind", trackers.TRACKERS.values())
def test_without_its_package_a_tracker_names_the_extra(
    kind: type[trackers.FolderTracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"not installed: pip install 'signvote\[{kind.package}\]'"):
        kind("anywhere")


def stopped_and_resumed(tracker: trackers.MLflow | WandB, folder: Path) -> dict[str, Any]:
    train(config("weighted"), toy(), folder, trackers=[tracker], watch=lambda run: run.round == 5)
    return train(config("weighted"), toy(), folder, trackers=[tracker], resume=True)


def test_mlflow_has_one_run_with_settings_and_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a real store, in files. A run that was stopped and resumed is one run there."""
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    result = stopped_and_resumed(MLflow(tmp_path / "run"), tmp_path / "run")
    client = MlflowClient()
    experiment = client.get_experiment_by_name("signvote")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["rule"] == "weighted"
    seen = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "accuracy")]
    measured = result["evaluations"]
    assert seen == list(zip(measured["round"], measured["accuracy"], strict=True))
    assert run.data.metrics["weight/worker 2"] == pytest.approx(result["trust"]["weight"][-1][2], rel=1e-4)


def records(path: Path) -> Iterator[Any]:
    """What a file of W&B holds: pieces with a checksum, a length and a kind; a record has one piece or several."""
    from wandb.proto.wandb_internal_pb2 import Record

    block = 2**15
    data = path.read_bytes()
    place = 7  # after the file's own header
    parts = b""
    while place < len(data):
        room = block - place % block
        if room < 7:
            place += room
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


@pytest.mark.slow
def test_wandb_keeps_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are read back. A run that was stopped and resumed has one id."""
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    out = tmp_path / "run"
    result = stopped_and_resumed(WandB(out), out)
    wandb.teardown()  # its process writes the last lines after a run has finished
    seen: dict[int, float] = {}
    ids = set()
    for path in sorted(out.glob("wandb/offline-run-*/*.wandb")):
        for record in records(path):
            row = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            if "accuracy" in row:
                seen[int(row["_step"])] = float(row["accuracy"])
            if record.run.run_id:
                ids.add(record.run.run_id)
    measured = result["evaluations"]
    assert seen == dict(zip(measured["round"], measured["accuracy"], strict=True))
    assert ids == {(out / "wandb-run.txt").read_text()}
