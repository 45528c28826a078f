"""Results files that were damaged or edited: shown, or refused in one sentence."""

from __future__ import annotations

import copy
import json
import random
import resource
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp
from tests.ranks import PATIENCE

from signvote import SignVoteError
from signvote.sim import Config, train
from signvote.tasks import load_task
from soak.damage import damaged
from soak.driver import Episode, Stage
from soak.processes import start

FAULTS = 150
MEMORY = 4 * 2**30  # bytes that a process may address: a small file must not ask for more
NUMBERS = (-1, 0, 10**9, 10**30, 1e308, float("nan"))
ODD: tuple[Any, ...] = (None, True, *NUMBERS, "", "=1+1", "x" * 300, [], {}, [[7, 10**9]])


def damaged_results(stage: Stage) -> Episode:
    """Values are changed, removed or moved, and bytes are damaged; each time the report is made."""
    sizes = (4, 16, 64)
    config = Config(
        task="mnist-10k", model="mlp", rule="robust", rounds=4, evaluate_every=2, batch_sizes=sizes
    )
    train(config, load_task("mnist-10k", model="mlp"), stage.folder)
    answers: Any = mp.get_context("forkserver").Queue()
    seed = stage.chance.randrange(2**31)
    process = start(check, stage.folder, seed, answers)
    survived = answers.get(timeout=PATIENCE)
    process.join()
    return Episode(injected=FAULTS, survived=survived)


def check(folder: Path, seed: int, answers: Any) -> None:
    """How many faults end in a report or in an error of signvote."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    chance = random.Random(seed)
    good = json.loads((folder / "result.json").read_text())
    path = folder / "damaged.json"
    survived = 0
    for _ in range(FAULTS):
        edited, what = changed(good, chance)
        data = json.dumps(edited).encode()
        path.write_bytes(data if chance.random() < 0.8 else damaged(data, chance))
        survived += is_shown_or_refused(path, what)
    answers.put(survived)


def changed(value: Any, chance: random.Random, name: str = "result") -> tuple[Any, str]:
    """The same with one place changed, at any depth; and what was done."""
    inside: list[Any] = []
    if isinstance(value, dict):
        inside = list(value)
    elif isinstance(value, list):
        inside = list(range(len(value)))
    if not inside or chance.random() < 0.1:
        odd = chance.choice(ODD)
        return odd, f"{name} = {odd!r}"
    at = chance.choice(inside)
    new = copy.copy(value)
    if chance.random() < 0.1:
        del new[at]
        return new, f"no {name}.{at}"
    new[at], what = changed(value[at], chance, f"{name}.{at}")
    return new, what


def is_shown_or_refused(path: Path, what: str) -> bool:
    """Everything that a report computes, but for the drawing."""
    from signvote.report import markdown, page, table
    from signvote.results import merged, read, to_csv

    try:
        results = merged({"here": read(path)})
        for made in (to_csv, markdown, table, page):
            made(results)
    except SignVoteError:
        return True
    except (Exception, MemoryError) as error:
        print(f"{what[:100]} gives {error!r}", flush=True)
        return False
    return True
