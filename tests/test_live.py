"""The live page: served on this machine alone, from the result files of runs that are still going."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from signvote import ConfigError
from signvote.cli.commands import parse
from signvote.report.live import HOST, Live, results_under
from signvote.results import results_of, write
from signvote.sim import Config, Run, train
from signvote.tasks import Task
from tests.test_report import made_up_run, unfinished


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    server = Live(tmp_path / "out")
    with server.serving():
        yield server


def asked(live: Live, path: str = "", **headers: str) -> str:
    with urlopen(Request(live.url + path, headers=headers)) as answer:
        assert answer.headers["Cache-Control"] == "no-store"
        return str(answer.read().decode())


def save(live: Live, result: dict[str, Any], name: str = "a") -> None:
    folder = live.folder / "runs" / name
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "result.json", result)


def test_the_page_follows_the_files(live: Live) -> None:
    states = [asked(live, "state")]
    assert "No run has been evaluated yet" in asked(live)
    for result in (unfinished(), unfinished(points=5), made_up_run(seed=1)):
        save(live, result)
        states.append(asked(live, "state"))
        html = asked(live)
        assert f'const SHOWN = "{states[-1]}"' in html
        assert ("unfinished" in html) == (result["status"] != "done")
    assert len(set(states)) == 4
    (live.folder / "results.json").write_text("{")
    assert "no results file of signvote" in asked(live)


def test_of_two_results_of_a_run_the_one_that_came_further_is_shown(live: Live) -> None:
    save(live, unfinished(points=7))
    write(
        live.folder / "results.json",
        results_of([unfinished(points=3), made_up_run("majority")], "the command"),
    )
    results = results_under(live.folder)
    assert [run["evaluations"]["round"][-1] for run in results["runs"]] == [60, 300]
    assert results["command"] == "the command"
    save(live, made_up_run(seed=1), "b")
    write(live.folder / "result.json", unfinished(points=9))
    assert [run["status"] for run in results_under(live.folder)["runs"]] == ["done", "done"]


def test_only_this_machine_is_answered_and_nothing_else_is_loaded(live: Live) -> None:
    assert live.server_address[0] == HOST == "127.0.0.1"
    save(live, made_up_run())
    html = asked(live, Host=f"localhost:{live.server_port}")
    assert not re.findall(r"(?:src|href)=|https?://(?!www\.w3\.org/2000/svg)", html)
    assert "connect-src 'self'" in html
    for path, host, code in (
        ("", "evil.example", 403),
        ("../etc/passwd", "", 404),
        ("runs/a/result.json", "", 404),
    ):
        with pytest.raises(HTTPError, match=str(code)):
            asked(live, path, **({"Host": host} if host else {}))


def test_a_run_is_on_the_page_from_its_first_evaluation_on(digits: Task, live: Live) -> None:
    seen = []

    def watch(run: Run) -> None:
        seen.append(f"{run.round} of 4 rounds, unfinished" in asked(live))

    config = Config(task="mnist-10k", model="mlp", batch_sizes=(4, 4), rounds=4, evaluate_every=1)
    train(config, digits, live.folder, watch=watch)
    assert seen == [True] * 4
    assert "unfinished" not in asked(live)


def test_train_serves_its_page_if_it_is_asked_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["train", "--model", "mlp", "--rounds", "1", "--batch-sizes", "4", "--out", str(tmp_path / "run")]
    parse([*line, "--live"]).run()
    (url,) = re.findall(r"The live page: (http://127\.0\.0\.1:\d+/)", capsys.readouterr().err)
    with pytest.raises(OSError, match="refused"):
        urlopen(url)


@pytest.mark.parametrize("port", [-1, 65_536])
def test_a_port_that_cannot_be(tmp_path: Path, port: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"port is {port}; it must be in 0\.\.65535, and 0 chooses a free one"
    ):
        Live(tmp_path, port)


def test_watch_serves_a_folder_until_it_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "result.json", made_up_run())
    asked_for = []

    def once(server: Live) -> None:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        asked_for.append(asked(server))
        thread.join()

    monkeypatch.setattr(Live, "serve_forever", once)
    parse(["watch", str(tmp_path), "--port", "0"]).run()
    assert json.loads(asked_for[0].split('id="data">')[1].split("</script>")[0])["metrics"]


def test_watch_says_so_if_its_folder_is_not_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Live, "serve_forever", lambda server: None)
    for folder in (tmp_path, tmp_path / "runs"):
        parse(["watch", str(folder), "--port", "0"]).run()
        missing = f"There is no folder {folder} yet; the page waits for it."
        assert (missing in capsys.readouterr().err) == (folder != tmp_path)
