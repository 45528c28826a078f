"""The film of the README: the terminal that it draws, and the file that the script wrote."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def film() -> ModuleType:
    spec = importlib.util.spec_from_file_location("film", DOCS / "film.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["film"] = module
    spec.loader.exec_module(module)
    return module


def plain(rows: tuple[str, ...]) -> list[str]:
    return [re.sub("<[^>]+>", "", row) for row in rows]


def test_the_terminal_understands_bars_colors_links_and_long_lines(film: ModuleType) -> None:
    screen = film.Screen()
    screen.feed("bar 1\r\nbar 2\r\n\x1b[2A\r\x1b[2Kdone\r\n\x1b[2K")
    screen.feed(
        "\x1b[1;32mgreen\x1b[0m \x1b]8;;file:///a\x1b\\link\x1b]8;;\x1b\\\r\n" + "x" * (film.COLUMNS + 3)
    )
    assert plain(screen.shown()) == ["done", "green link", "x" * film.COLUMNS, "xxx"]
    assert f'<tspan font-weight="bold" fill="{film.COLORS[2]}">green</tspan>' in screen.shown()[1]
    for cut in range(1, 12):  # a chunk may end anywhere
        data = "é\x1b[1mé\x1b[0m".encode()
        first, rest = film._whole(data[:cut])
        screen.feed(first)
        assert (first + (rest + data[cut:]).decode()).encode() == data


def test_the_film_shows_its_frames_one_after_the_other(film: ModuleType) -> None:
    shots = film.merged([(1.0, ("a", "b")), (0.5, ("a", "b")), (3.0, ("a",))])
    assert [seconds for seconds, _ in shots] == [1.0, 3.0]
    text = film.film(shots)
    ElementTree.fromstring(text)
    assert "0.000%{transform:translateX(0px)}25.000%{transform:translateX(" in text
    assert text.count("<text id=") == 2, "a row is stored once"


def test_the_committed_film_shows_the_commands(film: ModuleType) -> None:
    shown = "".join(ElementTree.fromstring((DOCS / "film.svg").read_text()).itertext())
    for command in film.COMMANDS:
        assert f"{film.PROMPT}{command}" in shown
    assert "report.html" in shown
