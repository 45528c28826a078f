"""Draws docs/architecture.svg from the lists of packages in docs/architecture.md: `python docs/architecture.py`.

A package is a row. A package that others import has a column, too, with an arrow into its row. An import is a dot where
the row of the importing package meets the column of the imported one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).with_suffix(".md")
PICTURE = Path(__file__).with_suffix(".svg")

HEADER = 70  # pixels above the first row, for the names of columns
FLOOR = 22  # above the rows of a floor, for its title
ROW = 32
BOX_HEIGHT = 26
BOX_WIDTH = 146
COLUMN = 15
LEFT = 6  # of the boxes
FIRST_COLUMN = LEFT + BOX_WIDTH + 22
ARROW_IN = 8  # below the top of a box
LINE_OUT = 18

COLORS = (
    "#3f7fd6",
    "#d9652b",
    "#b8529b",
    "#c9a227",
    "#7a68d0",
    "#1f9a8a",
    "#8a8f98",
)  # of floors, on light and on dark

STYLE = """
.rooms { --ink: #24292f; --box: #ffffff; --floor: #8080801f; font-family: system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { .rooms { --ink: #e6e6e6; --box: #1c1f26; } }
.rooms text { fill: var(--ink); }
.rooms .name { font: 12px ui-monospace, monospace; }
.rooms .column { font: 10.5px ui-monospace, monospace; }
.rooms .key { font-size: 11px; }
.rooms .title { font-size: 11px; font-weight: 600; }
.rooms .floor { fill: var(--floor); }
.rooms .box { fill: var(--box); stroke-width: 1.5; }
.rooms .out { stroke: var(--ink); stroke-opacity: 0.45; stroke-width: 1; }
.rooms .lane { fill: none; stroke-width: 1.5; }
""".strip()


class Room(NamedTuple):
    """A package of the page."""

    name: str
    floor: str
    imports: list[str]


def rooms(text: str) -> list[Room]:
    """The packages that the page lists, in its order; a floor is a heading of the page."""
    found = []
    floor = ""
    for line in text.splitlines():
        if line.startswith("### "):
            floor = line.removeprefix("### ")
        item = re.match(r"- \*\*`(.+?)`\*\* imports (.+)\.$", line)
        if item:
            imports = re.findall("`(.+?)`", item[2])
            found.append(Room(item[1], floor, imports))
    return found


class Picture:
    """Where every row and every column is, and the parts of the drawing."""

    def __init__(self, listed: list[Room]) -> None:
        self.rooms = listed
        self.floors = list(dict.fromkeys(room.floor for room in listed))
        self.color = {room.name: COLORS[self.floors.index(room.floor)] for room in listed}
        self.tops = self._tops()
        imported = {name for room in listed for name in room.imports}
        columns = [room.name for room in listed if room.name in imported]
        self.columns = {name: FIRST_COLUMN + COLUMN * at for at, name in enumerate(columns)}
        self.width = FIRST_COLUMN + COLUMN * len(columns)
        self.height = self.tops[listed[-1].name] + ROW + 4

    def _tops(self) -> dict[str, int]:
        """The top of each box."""
        tops = {}
        y = HEADER
        floor = ""
        for room in self.rooms:
            if room.floor != floor:
                y += FLOOR
                floor = room.floor
            tops[room.name] = y
            y += ROW
        return tops

    def svg(self) -> str:
        """The whole drawing."""
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="rooms" {size} role="img">',
            "<title>Imports between the packages of signvote</title>",
            f"<style>\n{STYLE}\n</style>",
            f'<text class="key" x="{LEFT}" y="{HEADER - 16}">A dot: the row</text>',
            f'<text class="key" x="{LEFT}" y="{HEADER - 2}">imports the column.</text>',
            *map(self._floor, self.floors),
            *map(self._out, self.rooms),
            *map(self._lane, self.columns),
            *map(self._box, self.rooms),
            *(self._dot(room.name, name) for room in self.rooms for name in room.imports),
            "</svg>",
        ]
        return "\n".join(part for part in parts if part) + "\n"

    def _floor(self, floor: str) -> str:
        """A band behind the rows of a floor, and its title."""
        tops = [self.tops[room.name] for room in self.rooms if room.floor == floor]
        top = tops[0] - FLOOR + 2
        height = tops[-1] + ROW - top - 2
        band = f'<rect class="floor" x="0" y="{top}" width="{self.width}" height="{height}" rx="5"/>'
        return f'{band}\n<text class="title" x="{LEFT}" y="{top + 14}">{floor}</text>'

    def _box(self, room: Room) -> str:
        top = self.tops[room.name]
        place = f'x="{LEFT}" y="{top}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="4"'
        box = f'<rect class="box" {place} stroke="{self.color[room.name]}"/>'
        return f'{box}\n<text class="name" x="{LEFT + 8}" y="{top + 17}">{room.name}</text>'

    def _out(self, room: Room) -> str:
        """The line from a box to the columns of its imports."""
        if not room.imports:
            return ""
        y = self.tops[room.name] + LINE_OUT
        end = max(self.columns[name] for name in room.imports)
        return f'<path class="out" d="M{LEFT + BOX_WIDTH} {y}H{end}"/>'

    def _lane(self, name: str) -> str:
        """A column, its name above, and its arrow into the box."""
        x = self.columns[name]
        ends = [self.tops[room.name] + LINE_OUT for room in self.rooms if name in room.imports]
        arrow = self.tops[name] + ARROW_IN
        tip = LEFT + BOX_WIDTH + 1
        color = self.color[name]
        lane = f"M{x} {min(arrow, *ends)}V{max(arrow, *ends)}M{x} {arrow}H{tip + 6}"
        label = name.split("/")[-1]
        return "\n".join(
            [
                f'<path class="lane" stroke="{color}" d="{lane}"/>',
                f'<path fill="{color}" d="M{tip} {arrow}l8 -4v8z"/>',
                f'<text class="column" transform="translate({x + 4} {HEADER}) rotate(-90)">{label}</text>',
            ]
        )

    def _dot(self, importing: str, imported: str) -> str:
        """An import; the title shows both names under the pointer."""
        x = self.columns[imported]
        y = self.tops[importing] + LINE_OUT
        title = f"<title>{importing} imports {imported}</title>"
        return f'<circle cx="{x}" cy="{y}" r="3.6" fill="{self.color[imported]}">{title}</circle>'


def drawn(page: Path = PAGE) -> str:
    """The picture of the packages that a page lists."""
    return Picture(rooms(page.read_text())).svg()


if __name__ == "__main__":
    PICTURE.write_text(drawn())
