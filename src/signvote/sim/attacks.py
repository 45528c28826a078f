"""What hostile workers send instead of their signs. A vote is one bit: nothing can be scaled.

An attack takes the votes that all workers would send if they were honest, and what attackers know, and
gives the votes that are sent. To add one, write a function and enter it in ATTACKS.

Notation: s is the honest sign of an attacker, v the sum of the signs of the honest workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist

import torch
from torch import Tensor

from signvote.core.bits import SERVER, coin_for, unpack_signs
from signvote.core.vote import Votes, everywhere
from signvote.errors import ConfigError
from signvote.kernels import Coin, Planes, words_for
from signvote.kernels.reference import chances, coin_words, pack
from signvote.names import check_name

RANDOM, FLIP, CLONES, TIES, TARGETS = range(1, 6)  # what coins are tossed for
LARGEST_BATCH = 2**32 - 1  # that a ballot can declare


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What attackers know beside the votes."""

    honest: int  # rows of the votes: this many are honest, the rest attack
    seed: int
    round: int
    strength: float  # the attack's own number, where it has one
    last: Planes | None = None  # the decision of the round before

    def coin(self, what: int, worker: int = SERVER, round: int | None = None) -> Coin:
        """One that differs by purpose, worker and round."""
        coin = coin_for("coin", self.seed + what, self.round if round is None else round, worker)
        assert coin is not None
        return coin


# ---- the attacks ---------------------------------------------------------------------------------


def invert(votes: Votes, scene: Scene) -> Votes:
    """-s: the opposite of every honest sign."""
    return _inverted(votes, scene, everywhere(votes.n, votes.planes.signs.device))


def flip(votes: Votes, scene: Scene) -> Votes:
    """Each sign inverted with probability `strength`, on its own."""
    device = votes.planes.signs.device
    coins = [scene.coin(FLIP, worker) for worker in votes.workers[scene.honest :]]
    return _inverted(
        votes, scene, torch.stack([pack(chances(c, votes.n, device) < scene.strength) for c in coins])
    )


def targeted(votes: Votes, scene: Scene) -> Votes:
    """s, but -s on a share `strength` of the coordinates, the same for all attackers and rounds."""
    chosen = chances(scene.coin(TARGETS, round=0), votes.n, votes.planes.signs.device) < scene.strength
    return _inverted(votes, scene, pack(chosen))


def random(votes: Votes, scene: Scene) -> Votes:
    """Fair random bits, everywhere."""
    coins = [scene.coin(RANDOM, worker) for worker in votes.workers[scene.honest :]]
    return _sent(votes, scene, torch.stack([_bits(votes, coin) for coin in coins]))


def clones(votes: Votes, scene: Scene) -> Votes:
    """Fair random bits, everywhere, the same from all attackers."""
    return _sent(votes, scene, _bits(votes, scene.coin(CLONES)))


def anti(votes: Votes, scene: Scene) -> Votes:
    """-sign(v), from all attackers; a shared coin where v = 0."""
    v, _, _ = _honest_sums(votes, scene)
    return _sent(votes, scene, _signs_of(votes, scene, -v))


def alie(votes: Votes, scene: Scene) -> Votes:
    """A little is enough: sign(mu - z sigma), from all attackers; a shared coin where that is 0.

    mu and sigma are mean and deviation of the honest workers' *signs*, no vote being 0: gradients do not
    travel. z = Phi^-1((n - floor(n/2 + 1)) / (n - f)) for n voters of which f attack: the attackers and
    those honest that lie beyond z sigma are a majority. It is 0 or more, and at most 4.
    """
    v, votes_cast, present = _honest_sums(votes, scene)
    n, honest = len(votes.workers), max(1, scene.honest)
    z = NormalDist().inv_cdf(min(max((n - (n // 2 + 1)) / honest, 0.5), 0.99996))
    mu = v.double() / present
    sigma = (votes_cast / present - mu**2).clamp_min(0).sqrt()
    return _sent(votes, scene, _signs_of(votes, scene, mu - z * sigma))


def mimic(votes: Votes, scene: Scene) -> Votes:
    """What the first honest worker sends; s if there is none."""
    if not scene.honest:
        return votes
    taking_part = _present(votes)[: scene.honest]
    first = taking_part.long().argmax()[None]
    copied = votes.planes.map(lambda p: p[first][0])
    return _sent(votes, scene, copied.signs, copied.support)


def oscillator(votes: Votes, scene: Scene) -> Votes:
    """Nine rounds s, then one -sign(v)."""
    return votes if scene.round % 10 else anti(votes, scene)


def echo(votes: Votes, scene: Scene) -> Votes:
    """The decision of the round before; s in the first."""
    return votes if scene.last is None else _sent(votes, scene, *scene.last)


def lie(votes: Votes, scene: Scene) -> Votes:
    """s, declaring a batch size `strength` times the true one."""
    sizes = votes.batch_sizes[scene.honest :]
    declared = tuple(min(LARGEST_BATCH, max(1, round(scene.strength * size))) for size in sizes)
    return replace(votes, batch_sizes=votes.batch_sizes[: scene.honest] + declared)


def label_flip(votes: Votes, scene: Scene) -> Votes:
    """s, of gradients of wrong labels: 9 - y for ten classes. See `Hostility.relabels`."""
    return votes


@dataclass(frozen=True)
class Attack:
    """An attack, and the strength it has by default and at most; None: it has none."""

    act: Callable[[Votes, Scene], Votes]
    strength: float | None = None
    most: float = 1.0


ATTACKS: dict[str, Attack] = {
    "invert": Attack(invert),
    "flip": Attack(flip, 0.5),
    "random": Attack(random),
    "anti": Attack(anti),
    "alie": Attack(alie),
    "mimic": Attack(mimic),
    "clones": Attack(clones),
    "targeted": Attack(targeted, 0.1),
    "sleeper": Attack(anti),
    "oscillator": Attack(oscillator),
    "echo": Attack(echo),
    "label-flip": Attack(label_flip),
    "lie": Attack(lie, 100.0, 2.0**32),
}


# ---- planes --------------------------------------------------------------------------------------


def _sent(votes: Votes, scene: Scene, signs: Tensor, support: Tensor | None = None) -> Votes:
    """Votes in which attackers send these planes, one for all or one each; no support: they vote everywhere."""
    honest, rest = scene.honest, len(votes.workers) - scene.honest

    def joined(old: Tensor, new: Tensor) -> Tensor:
        return torch.cat([old[:honest], new.expand(rest, -1)])

    planes = Planes(joined(votes.planes.signs, signs), None)
    if votes.planes.support is not None or support is not None:
        full = everywhere(votes.n, signs.device)
        old = full.expand_as(votes.planes.signs) if votes.planes.support is None else votes.planes.support
        planes = planes._replace(support=joined(old, full if support is None else support))
    return replace(votes, planes=planes)


def _inverted(votes: Votes, scene: Scene, where: Tensor) -> Votes:
    """Votes in which attackers invert their own where they cast one."""
    mine = votes.planes.map(lambda p: p[scene.honest :])
    cast = where if mine.support is None else where & mine.support
    return _sent(votes, scene, mine.signs ^ cast, mine.support)


def _bits(votes: Votes, coin: Coin) -> Tensor:
    device = votes.planes.signs.device
    return coin_words(coin, words_for(votes.n), device) & everywhere(votes.n, device)


def _signs_of(votes: Votes, scene: Scene, values: Tensor) -> Tensor:
    """A plane: the sign of each value, a shared coin for a zero."""
    return pack(values > 0) | (pack(values == 0) & _bits(votes, scene.coin(TIES)))


def _present(votes: Votes) -> Tensor:
    if votes.present is not None:
        return votes.present
    return torch.ones(len(votes.workers), dtype=torch.bool, device=votes.planes.signs.device)


def _honest_sums(votes: Votes, scene: Scene) -> tuple[Tensor, Tensor, Tensor]:
    """Of the honest workers that take part: the sum of signs and the votes cast, (n,); their number."""
    present, device = _present(votes), votes.planes.signs.device
    v = torch.zeros(votes.n, dtype=torch.int32, device=device)
    cast = torch.zeros_like(v)
    for row in range(scene.honest):
        signs = unpack_signs(votes.planes.map(partial(torch.select, dim=0, index=row)), votes.n)
        v += signs * present[row]
        cast += signs.abs() * present[row]
    return v, cast, present[: scene.honest].sum().clamp_min(1)


# ---- who attacks ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hostility:
    """Which workers attack, how, and from which round on."""

    name: str
    first: int  # workers from this one on attack
    start: int
    strength: float

    def change(self, votes: Votes, *, seed: int, round: int, last: Planes | None) -> Votes:
        """What is really sent, of votes sorted by worker."""
        honest = sum(worker < self.first for worker in votes.workers)
        if round < self.start or honest == len(votes.workers):
            return votes
        scene = Scene(honest=honest, seed=seed, round=round, strength=self.strength, last=last)
        return ATTACKS[self.name].act(votes, scene)

    def relabels(self, worker: int, round: int) -> bool:
        """Whether this worker trains on wrong labels in a round."""
        return self.name == "label-flip" and worker >= self.first and round >= self.start


def stacked(
    planes: Sequence[Planes | None], workers: Sequence[int], n: int, batch_sizes: Sequence[int]
) -> Votes:
    """Votes of workers one by one; None: that one takes no part."""
    known = [p for p in planes if p is not None]
    device = known[0].signs.device if known else torch.device("cpu")
    full, empty = everywhere(n, device), torch.zeros(words_for(n), dtype=torch.int64, device=device)
    signs = torch.stack([empty if p is None else p.signs for p in planes])
    support = None
    if any(p.support is not None for p in known):
        support = torch.stack([full if p is None or p.support is None else p.support for p in planes])
    present = torch.tensor([p is not None for p in planes], device=device)
    sizes = tuple(batch_sizes[m] for m in workers)
    return Votes(
        workers=tuple(workers), planes=Planes(signs, support), n=n, batch_sizes=sizes, present=present
    )


def parse_attack(text: str | None, workers: int) -> Hostility | None:
    """`NAME[=STRENGTH]:COUNT[:START]`; the last COUNT workers attack: in modes 2 to 4 the strongest."""
    if text is None:
        return None
    name, *numbers = text.split(":")
    name, equals, given = name.partition("=")
    check_name("attack", name, ATTACKS)
    attack = ATTACKS[name]
    if equals and attack.strength is None:
        raise ConfigError(f"attack is {text!r}; {name} has no strength")
    try:
        count, start = int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 1
        strength = float(given) if equals else attack.strength or 0.0
    except (IndexError, ValueError):
        count, start, strength = -1, 1, 0.0
    if not 0 <= count <= workers or len(numbers) > 2 or not 0 <= strength <= attack.most:
        raise ConfigError(
            f"attack is {text!r}; wanted NAME[=STRENGTH]:COUNT[:START] with COUNT in 0..{workers},"
            f" STRENGTH in [0, {attack.most:g}]"
        )
    if name == "sleeper" and len(numbers) < 2:
        raise ConfigError(f"attack is {text!r}; a sleeper needs START, the round it wakes up in: {text}:100")
    return Hostility(name, workers - count, start, strength)
