"""Ranks of torch.distributed killed at random moments, and started again as under torchrun."""

from __future__ import annotations

import os
import random
import signal
import threading
import traceback
from pathlib import Path

from tests.ranks import Trainer, checksum, config, simulated, together
from tests.test_ddp_faults import heard_of

from signvote.engines.ddp import load, process_group, save
from signvote.errors import EngineError

KILLS = 20


def killed_now_and_then(rank: int, world: int, attempt: int, rounds: int, folder: str) -> int | None:
    """Trains from the last checkpoint; until the last attempt one rank is killed, who and when is random."""
    process_group.GRACE = 0.5  # not to wait 20 times for a rank that is dead
    trainer = Trainer(rank, config("it-signsgd", world, rounds))
    if found := load(folder, trainer.state):
        trainer.model.load_state_dict(found[0]["model"])
    chance = random.Random(attempt)
    victim, after = chance.randrange(world), chance.randrange(4)
    start = trainer.state.round
    while trainer.state.round < rounds:
        if attempt < KILLS and rank == victim and trainer.state.round == start + after:
            delay = chance.random() * 0.05
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        try:
            trainer.train(1)
            if trainer.state.round % 2 == 0:
                save(folder, trainer.state, {"model": trainer.model.state_dict()})
        except EngineError as error:
            assert victim in heard_of(str(error))[1], error
            return None
        except RuntimeError:  # DDP's own, once: when it rebuilds its buckets
            if "_rebuild_buckets" not in traceback.format_exc():
                raise
            return None
    return checksum(trainer.model)


def test_twenty_kills_at_random_moments_change_nothing(tmp_path: Path) -> None:
    """In the end the simulator's parameters, bit for bit."""
    world, rounds, deaths = 3, 150, 0
    for attempt in range(KILLS + 1):
        sums = together(world, killed_now_and_then, attempt, rounds, str(tmp_path / "saved"), folder=tmp_path)
        deaths += None in sums
    assert deaths == KILLS
    assert sums == [simulated(config("it-signsgd", world, rounds))[-1]] * world
    kept = sorted(p.name for p in (tmp_path / "saved").iterdir())
    assert kept == ["latest", "round-000150"]
