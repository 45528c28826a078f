"""What hostile workers send instead of their signs. A vote is one bit: nothing can be scaled.

An attack takes the planes that an honest worker would send and gives those that go into the ballot.
To add one, write a function and enter it in ATTACKS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from signvote.core.bits import coin_for
from signvote.core.vote import everywhere
from signvote.errors import ConfigError
from signvote.kernels import Planes, words_for
from signvote.kernels.reference import chances, coin_words, pack
from signvote.names import check_name


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What an attacker knows: its place and time, and the length of the vector."""

    n: int
    seed: int
    round: int
    worker: int
    strength: float  # the attack's own number, where it has one


def invert(planes: Planes, scene: Scene) -> Planes:
    """-s: the opposite of every honest sign."""
    return Planes(planes.signs ^ _voted(planes, scene), planes.support)


def flip(planes: Planes, scene: Scene) -> Planes:
    """Each sign inverted with probability `strength`, on its own."""
    coin = coin_for("coin", scene.seed + 2, scene.round, scene.worker)
    assert coin is not None
    flips = pack(chances(coin, scene.n, planes.signs.device) < scene.strength)
    return Planes(planes.signs ^ (flips & _voted(planes, scene)), planes.support)


def random(planes: Planes, scene: Scene) -> Planes:
    """Fair random bits, everywhere."""
    coin = coin_for("coin", scene.seed + 1, scene.round, scene.worker)
    assert coin is not None
    device = planes.signs.device
    return Planes(coin_words(coin, words_for(scene.n), device) & everywhere(scene.n, device), None)


def _voted(planes: Planes, scene: Scene) -> Tensor:
    return everywhere(scene.n, planes.signs.device) if planes.support is None else planes.support


Attack = Callable[[Planes, Scene], Planes]
ATTACKS: dict[str, Attack] = {"invert": invert, "flip": flip, "random": random}


@dataclass(frozen=True)
class Hostility:
    """Which workers attack, how, and from which round on."""

    attack: Attack
    workers: frozenset[int]
    start: int
    strength: float

    def change(self, planes: Planes, *, n: int, seed: int, round: int, worker: int) -> Planes:
        """What this worker really sends."""
        if worker not in self.workers or round < self.start:
            return planes
        scene = Scene(n=n, seed=seed, round=round, worker=worker, strength=self.strength)
        return self.attack(planes, scene)


def parse_attack(text: str | None, workers: int) -> Hostility | None:
    """`NAME[=STRENGTH]:COUNT[:START]`; the last COUNT workers attack: in modes 2 to 4 the strongest."""
    if text is None:
        return None
    name, *numbers = text.split(":")
    name, _, strength = name.partition("=")
    check_name("attack", name, ATTACKS)
    try:
        count, start = int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 1
        force = float(strength or 0.5)
    except (IndexError, ValueError):
        count, start, force = -1, 1, 0.5
    if not 0 <= count <= workers or len(numbers) > 2 or not 0 <= force <= 1:
        raise ConfigError(
            f"attack is {text!r}; wanted NAME[=STRENGTH]:COUNT[:START] with COUNT in 0..{workers}, STRENGTH in [0, 1]"
        )
    return Hostility(ATTACKS[name], frozenset(range(workers - count, workers)), start, force)
