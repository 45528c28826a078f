"""docs/architecture.md: its lists and its picture are the imports, and the ways of a vote are the calls."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from signvote import Vote
from signvote.sim import Config, train
from signvote.sim.machine import Machine
from signvote.tasks import load_task
from tests import test_flower as flower
from tests.ranks import together
from tests.test_package import ROOT, SOURCE, imports_of

PAGE = ROOT / "docs" / "architecture.md"
SCRIPT = runpy.run_path(str(ROOT / "docs" / "architecture.py"))
ROOMS = SCRIPT["rooms"](PAGE.read_text())
NAMES = [room.name for room in ROOMS]
SEVERAL = {
    "bench": ("bench", "bench_cuda"),
    "cli": ("cli", "__main__"),
    "shared": ("errors", "names", "formats", "atomic", "metrics", "spool", "recipes"),
}  # rooms of several modules; any other room is a module or a package
Calls = list[tuple[str, str]]
ENGINES = ("Simulator, one by one", "Simulator, joint pass", "torch.distributed", "Flower")


# ---- the picture ---------------------------------------------------------------------------------


def room_of(module: str) -> str:
    """The room of a module: signvote.sim.joint.layers -> sim/joint."""
    parts = module.split(".")[1:]
    for length in (2, 1):
        name = "/".join(parts[:length])
        if name in NAMES:
            return name
    found = [room for room, modules in SEVERAL.items() if parts and parts[0] in modules]
    return found[0] if found else "signvote"


def module_of(path: Path) -> str:
    """The module that a file is, with __init__ for a package."""
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)


def imports_between_rooms() -> set[tuple[str, str]]:
    found = set()
    for path in SOURCE.rglob("*.py"):
        own = room_of(module_of(path))
        names = imports_of(path) - {"signvote.__version__"}
        found |= {(own, room_of(name)) for name in names if room_of(name) != own}
    return found


def test_every_import_between_packages_is_in_the_lists_and_nothing_else() -> None:
    listed = {(room.name, name) for room in ROOMS for name in room.imports}
    actual = imports_between_rooms()
    assert actual - listed == set(), "imports that the page does not list"
    assert listed - actual == set(), "imports that the page lists and the code does not have"


def test_every_arrow_is_an_import_and_every_import_an_arrow() -> None:
    arrows = re.findall(r"<title>(\S+) imports (\S+)</title>", SCRIPT["PICTURE"].read_text())
    assert len(arrows) == len(set(arrows))
    assert set(arrows) == imports_between_rooms()


def test_the_picture_is_drawn_from_the_lists() -> None:
    assert SCRIPT["PICTURE"].read_text() == SCRIPT["drawn"](), "run python docs/architecture.py"


def test_every_package_and_module_is_a_room() -> None:
    assert len(NAMES) == len(set(NAMES))
    tops = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in SOURCE.rglob("*.py")}
    rooms = {name.split("/")[0] for name in NAMES} - set(SEVERAL) - {"signvote"}
    modules = {module for several in SEVERAL.values() for module in several}
    assert rooms | modules == tops - {"__init__"}


def test_arrows_point_down_but_inside_the_simulator() -> None:
    up = [
        (room.name, name)
        for room in ROOMS
        for name in room.imports
        if NAMES.index(name) < NAMES.index(room.name)
    ]
    assert up == [("sim/joint", "sim")]


def test_every_package_has_a_sentence_on_what_it_may_touch() -> None:
    items = re.findall(r"^- \*\*`(.+?)`\*\* imports [^\n]+\n((?:  .+\n)+)", PAGE.read_text(), re.MULTILINE)
    assert [name for name, _ in items] == NAMES
    for name, sentence in items:
        assert re.match(r"  It may .*; it may not ", sentence.replace("\n ", "")), name


# ---- the ways of a vote --------------------------------------------------------------------------


class Step(NamedTuple):
    room: str
    name: str  # of a function or method
    path: Path


def way(engine: str) -> list[Step]:
    """The steps under an engine's heading."""
    text = PAGE.read_text().split(f"\n### {engine}\n")[1].split("\n#")[0]
    found = re.findall(r"^1\. \*\*(\S+)\*\* \[`(\S+)`\]\((\S+)\) ", text, re.MULTILINE)
    assert len(found) == len(re.findall(r"^1\. ", text, re.MULTILINE)), "a step has another form"
    return [Step(room, name, (PAGE.parent / path).resolve()) for room, name, path in found]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_step_is_a_function_of_the_file_and_package_it_names(engine: str) -> None:
    steps = way(engine)
    assert len(steps) > 10
    for step in steps:
        module = module_of(step.path)
        assert room_of(module) == step.room, step
        found: Any = import_module(module.removesuffix(".__init__"))
        for part in step.name.split("."):
            found = getattr(found, part)
        assert callable(found), step
        assert found.__module__ == module.removesuffix(".__init__"), f"{step.name} is in {found.__module__}"


def calls(work: Callable[[], object]) -> Calls:
    """The functions of signvote that some work calls, in order: (room, name)."""
    found: Calls = []

    def note(frame: FrameType, event: str, _: object) -> None:
        module = str(frame.f_globals.get("__name__"))
        if event == "call" and module.startswith("signvote."):
            found.append((room_of(module), frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return found


def simulated(folder: Path, *, rounds: int, together: bool) -> None:
    config = Config(
        task="mnist-10k",
        model="mlp",
        rule="weighted",
        batch_sizes=(4, 4, 4),
        rounds=rounds,
        evaluate_every=rounds,
        attack="invert:1",
    )
    train(config, load_task("mnist-10k", model="mlp"), folder, machine=Machine(together=together))


def over_ranks(rank: int, world: int) -> Calls:
    torch.manual_seed(0)
    model = nn.Linear(30, 10)
    optimizer = Vote(model.parameters())
    model(torch.ones(2, 30)).sum().backward()
    return calls(optimizer.step)


def over_flower(folder: Path) -> None:
    flower.train(flower.grid_of(), 2, checkpoint=folder / "checkpoint.safetensors")


ROUNDS: dict[str, Callable[[Path], Calls]] = {
    "Simulator, one by one": lambda folder: calls(lambda: simulated(folder, rounds=1, together=False)),
    "Simulator, joint pass": lambda folder: calls(lambda: simulated(folder, rounds=2, together=True)),
    "torch.distributed": lambda folder: together(2, over_ranks, folder=folder)[0],
    "Flower": lambda folder: calls(lambda: over_flower(folder)),
}  # two rounds where the end of a way is in the next round


def first_missing(steps: list[Step], called: Iterator[tuple[str, str]]) -> Step | None:
    """The first step that the calls do not have after the step before; None: they have all, in order."""
    for step in steps:
        wanted = (step.room, step.name.split(".")[-1])
        if wanted not in called:  # uses up the calls until it
            return step
    return None


@pytest.mark.parametrize("engine", ENGINES)
def test_a_vote_goes_the_way_that_the_page_shows(engine: str, tmp_path: Path) -> None:
    called = ROUNDS[engine](tmp_path)
    missing = first_missing(way(engine), iter(called))
    assert missing is None, f"{missing} is not called, or not after the steps before"
