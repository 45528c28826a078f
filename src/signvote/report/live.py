"""The page of runs that are still going, on this machine: `signvote watch DIR`, or `--live` of a command that trains.

The server listens on 127.0.0.1 alone. It reads the result files of a folder when a browser asks, and writes nothing.
The page asks every two seconds whether a file has changed, and loads itself again if one has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from signvote.errors import ConfigError, SignVoteError
from signvote.report.webpage import page, waiting_page
from signvote.results import Result, Results, identity_of, read, results_file, results_of

HOST = "127.0.0.1"
LAST_PORT = 2**16 - 1
STATE = "/state"
HTML = "text/html; charset=utf-8"


class Live(ThreadingHTTPServer):
    """Serves the page of the runs in a folder.

    Args:
        folder: what `train`, `compare` or `study` writes into; it need not be there yet.
        port: 0 chooses a free one.

    """

    daemon_threads = True

    def __init__(self, folder: Path | str, port: int = 0) -> None:
        if not 0 <= port <= LAST_PORT:
            raise ConfigError(f"port is {port}; it must be in 0..{LAST_PORT}, and 0 chooses a free one")
        super().__init__((HOST, port), Answer)
        self.folder = Path(folder)

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{HOST}:{self.server_port}/"

    @property
    def state(self) -> str:
        """A text that changes whenever a result file does."""
        stamps = [
            (path.name, path.parent.name, path.stat().st_mtime_ns) for path in result_files(self.folder)
        ]
        return str(hash(tuple(stamps)))

    def page(self) -> str:
        """The page of all runs that have been evaluated, finished or not."""
        try:
            results = results_under(self.folder)
            return page(results, live=self.state) if results["runs"] else waiting_page(self.state)
        except (SignVoteError, OSError) as error:
            return waiting_page(self.state, str(error))

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Serve from a thread; the block gets the address."""
        Thread(target=self.serve_forever, daemon=True).start()
        try:
            yield self.url
        finally:
            self.shutdown()
            self.server_close()


class Answer(BaseHTTPRequestHandler):
    """Answers a browser of this machine: the page, or its state."""

    server: Live

    def do_GET(self) -> None:
        """Send the page, or its state."""
        names = (f"{HOST}:{self.server.server_port}", f"localhost:{self.server.server_port}")
        if self.headers.get("Host") not in names:  # a page of somebody else whose name leads here
            self.send_error(403)
        elif self.path == STATE:
            self._send(self.server.state, "text/plain")
        elif self.path == "/":
            self._send(self.server.page(), HTML)
        else:
            self.send_error(404)

    def _send(self, text: str, kind: str) -> None:
        data = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the terminal shows the progress of the runs."""


def result_files(folder: Path) -> list[Path]:
    """The files that hold results of runs, finished or not."""
    found = [results_file(folder), folder / "result.json", *sorted(folder.glob("runs/*/result.json"))]
    return [path for path in found if path.is_file()]


def results_under(folder: Path) -> Results:
    """All runs of a folder that have been evaluated. Of two results of a run, the one that came further counts."""
    best: dict[str, Result] = {}
    commands = []
    for path in result_files(folder):
        results = read(path)
        commands.append(results.get("command", ""))
        for run in results["runs"]:
            rival = best.get(identity_of(run))
            if run["evaluations"].get("round") and (rival is None or _progress(run) > _progress(rival)):
                best[identity_of(run)] = run
    return results_of(best.values(), "\n".join(filter(None, commands)))


def _progress(run: Result) -> tuple[bool, int]:
    return run["status"] == "done", int(run["evaluations"]["round"][-1])
