"""Records docs/film.svg, the first minute with signvote: `python docs/film.py`.

The commands run in a pseudo-terminal, and everything in the film is what they printed. Long waits are cut to a second.
The film is an SVG: all frames stand side by side, and a rule of CSS moves the next one into the window.
"""

from __future__ import annotations

import os
import pty
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
COLUMNS = 88
ROWS = 22
COMMANDS = (
    "signvote compare --model mlp --rules majority weighted --modes 1 4 --rounds 100",
    "signvote train --model mlp --rule robust --mode 3 --attack sleeper:3:50 --rounds 100",
)
PROMPT = "$ "
FRAME = 0.25  # seconds between two frames, at least
WAIT = 1.0  # seconds that the film waits, at most
LAST = 4.0  # seconds of the last frame
KEYS = 6  # typed in a frame
COLORS = ("#9aa4b1", "#ef6b73", "#7fc98b", "#e5c07b", "#61afef", "#c98fe0", "#56c1d6", "#e7eaee")
CELL = (8.4, 18)  # pixels
CONTROL = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b\]8;[^\x1b]*\x1b\\|[\r\n]|[^\x1b\r\n]")

Cell = tuple[str, str]  # a character and its style
Frame = tuple[float, tuple[str, ...]]  # how long it is shown, and its rows as SVG


class Screen:
    """A terminal: it understands what progress bars and tables print."""

    def __init__(self) -> None:
        self.rows: list[list[Cell]] = [[]]
        self.row = 0
        self.column = 0
        self.style = ""

    def feed(self, text: str) -> None:
        """Show what a program printed."""
        for found in CONTROL.finditer(text):
            if found[2]:
                self._control(found[1], found[2])
            elif found[0] == "\r":
                self.column = 0
            elif found[0] == "\n":
                self._next_row()
            elif len(found[0]) == 1:
                self._write(found[0])

    def shown(self) -> tuple[str, ...]:
        """The last rows as SVG."""
        return tuple(_drawn(row) for row in self.rows[-ROWS:])

    def _control(self, numbers: str, letter: str) -> None:
        if letter == "A":
            self.row = max(0, self.row - int(numbers or 1))
        elif letter == "K":
            self.rows[self.row] = []
        elif letter == "m":
            self.style = _style(self.style, numbers)

    def _next_row(self) -> None:
        self.row += 1
        self.rows += [[] for _ in range(self.row + 1 - len(self.rows))]

    def _write(self, character: str) -> None:
        if self.column == COLUMNS:
            self._next_row()
            self.column = 0
        row = self.rows[self.row]
        row += [(" ", "")] * (self.column + 1 - len(row))
        row[self.column] = (character, self.style)
        self.column += 1


def _style(before: str, numbers: str) -> str:
    """The style after a control sequence: attributes of an SVG text."""
    style = before
    for number in map(int, filter(None, (numbers or "0").split(";"))):
        if number == 0:
            style = ""
        elif number == 1:
            style += ' font-weight="bold"'
        elif 30 <= number % 60 < 38:  # 30 to 37, and 90 to 97
            style = re.sub(' fill="[^"]*"', "", style) + f' fill="{COLORS[number % 10]}"'
    return style


def _drawn(row: list[Cell]) -> str:
    """A row as parts of a text, one for each style."""
    parts: list[Cell] = []
    for character, style in row:
        if parts and parts[-1][1] == style:
            parts[-1] = (parts[-1][0] + character, style)
        else:
            parts.append((character, style))
    return "".join(f"<tspan{style}>{escape(text)}</tspan>" for text, style in parts).rstrip()


def recorded(command: str, folder: Path) -> Iterator[tuple[float, str]]:
    """What a command prints in a terminal, with the seconds since its start."""
    ours, its = pty.openpty()
    bin = Path(sys.executable).parent
    usual = {"PATH": f"{bin}:{os.environ['PATH']}", "HOME": os.environ["HOME"], "TERM": "xterm"}
    size = {"COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    words = shlex.split(command)
    process = subprocess.Popen(words, stdin=its, stdout=its, stderr=its, env=usual | size, cwd=folder)
    os.close(its)
    start = time.monotonic()
    rest = b""
    while data := _read(ours):
        text, rest = _whole(rest + data)
        yield time.monotonic() - start, text
    os.close(ours)
    if process.wait():
        raise SystemExit(f"{command} ended with status {process.returncode}")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 2**16)
    except OSError:  # so Linux says that the program has ended
        return b""


def _whole(data: bytes) -> tuple[str, bytes]:
    """The text up to the last complete character and control sequence, and the rest."""
    end = len(data)
    while end and (data[end - 1] >= 0x80 or b"\x1b" in data[max(0, end - 3) : end]):
        end -= 1
    return data[:end].decode(), data[end:]


def frames() -> Iterator[Frame]:
    """The film: each command is typed, then runs."""
    screen = Screen()
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            screen.feed(PROMPT)
            for start in range(0, len(command), KEYS):
                screen.feed(command[start : start + KEYS])
                yield 0.1, screen.shown()
            screen.feed("\r\n")
            yield from _running(screen, command, Path(folder))
    screen.feed(PROMPT)
    yield LAST, screen.shown()


def _running(screen: Screen, command: str, folder: Path) -> Iterator[Frame]:
    before = 0.0
    for seconds, text in recorded(command, folder):
        if seconds - before >= FRAME:
            yield min(WAIT, seconds - before), screen.shown()
            before = seconds
        screen.feed(text)
    yield WAIT, screen.shown()


def film(shots: list[Frame]) -> str:
    """The frames as an SVG."""
    width = round(COLUMNS * CELL[0]) + 24
    height = ROWS * CELL[1] + 24
    rows = {
        row: f"r{i}" for i, row in enumerate(dict.fromkeys(row for _, shown in shots for row in shown if row))
    }
    total = sum(seconds for seconds, _ in shots)
    passed = 0.0
    moves = []
    pictures = []
    for i, (seconds, shown) in enumerate(shots):
        moves.append(f"{100 * passed / total:.3f}%{{transform:translateX({-i * width}px)}}")
        passed += seconds
        lines = [f'<use href="#{rows[row]}" y="{k * CELL[1]}"/>' for k, row in enumerate(shown) if row]
        pictures.append(f'<g transform="translate({i * width})">{"".join(lines)}</g>')
    texts = "".join(f'<text id="{name}" x="12" y="26">{row}</text>' for row, name in rows.items())
    end = -(len(shots) - 1) * width
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img"'
        ' aria-label="A terminal: signvote compares two rules, then trains with three hostile workers">\n'
        "<style>text{font:14px ui-monospace,Menlo,'DejaVu Sans Mono',monospace;fill:#e7eaee;white-space:pre}"
        f"@keyframes film{{{''.join(moves)}}}"
        f".film{{animation:film {total:.2f}s steps(1,end) infinite}}"
        f"@media (prefers-reduced-motion){{.film{{animation:none;transform:translateX({end}px)}}}}</style>\n"
        f'<rect width="{width}" height="{height}" rx="8" fill="#14171b"/>\n<defs>{texts}</defs>\n'
        f'<g class="film">{"".join(pictures)}</g>\n</svg>\n'
    )


def merged(shots: list[Frame]) -> list[Frame]:
    """The same film, with equal frames in a row as one."""
    kept: list[Frame] = []
    for seconds, shown in shots:
        if kept and kept[-1][1] == shown:
            kept[-1] = (min(WAIT, kept[-1][0] + seconds), shown)
        else:
            kept.append((seconds, shown))
    return kept


if __name__ == "__main__":
    (HERE / "film.svg").write_text(film(merged(list(frames()))))
