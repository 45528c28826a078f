"""Attacks: votes that hostile workers send instead of their own. A vote is one bit, so nothing can be scaled.

An attack maps the votes that all workers would send if they were honest to the votes that they do send. A Scene
holds everything else that attackers know. To add an attack, write a function and enter it in ATTACKS.

Notation: s is the honest sign of an attacker, v the sum of the signs of the honest workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from signvote.core.bits import SERVER, coin_for, unpack_signs
from signvote.core.corrections import LEAK
from signvote.core.vote import Votes, everywhere
from signvote.kernels import Coin, Planes, words_for
from signvote.kernels.reference import chances, coin_words, pack

# Purposes of coins: attacks with different purposes draw different bits.
RANDOM = 1
FLIP = 2
CLONES = 3
TIES = 4
TARGETS = 5
SUMS = 6
TURNS = 7

LARGEST_BATCH = 2**32 - 1  # the most that a ballot can declare
BRAGGING = 1000.0  # times its size that an impostor declares
PATIENCE = 40  # rounds in which it agrees with everybody


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Everything that attackers know, except the votes."""

    honest: int  # the first rows of the votes are honest, the others attack
    seed: int
    round: int
    strength: float  # the parameter of the attack, if it has one
    last: Planes | None = None  # the decision of the previous round

    def coin(self, purpose: int, worker: int = SERVER, round: int | None = None) -> Coin:
        """A coin that differs by purpose, worker and round."""
        if round is None:
            round = self.round
        coin = coin_for("coin", self.seed + purpose, round, worker)
        assert coin is not None
        return coin


# ---- the attacks ---------------------------------------------------------------------------------


def invert(votes: Votes, scene: Scene) -> Votes:
    """-s: the opposite of every honest sign."""
    full = everywhere(votes.n, _device(votes))
    return _inverted(votes, scene, full)


def flip(votes: Votes, scene: Scene) -> Votes:
    """Invert each sign with probability `strength`, independently."""
    coins = _coins(votes, scene, FLIP)
    where = [_chosen(votes, scene, coin) for coin in coins]
    return _inverted(votes, scene, torch.stack(where))


def targeted(votes: Votes, scene: Scene) -> Votes:
    """s, but -s on a share `strength` of the coordinates, the same for all attackers and rounds."""
    coin = scene.coin(TARGETS, round=0)
    where = _chosen(votes, scene, coin)
    return _inverted(votes, scene, where)


def random(votes: Votes, scene: Scene) -> Votes:
    """Fair random bits, everywhere."""
    coins = _coins(votes, scene, RANDOM)
    signs = [_bits(votes, coin) for coin in coins]
    return _sent(votes, scene, torch.stack(signs))


def clones(votes: Votes, scene: Scene) -> Votes:
    """Fair random bits, everywhere, the same from all attackers."""
    coin = scene.coin(CLONES)
    signs = _bits(votes, coin)
    return _sent(votes, scene, signs)


def anti(votes: Votes, scene: Scene) -> Votes:
    """-sign(v), from all attackers; a shared coin where v = 0."""
    v = _honest_sums(votes, scene).signs
    signs = _signs_of(votes, scene, -v)
    return _sent(votes, scene, signs)


def alie(votes: Votes, scene: Scene) -> Votes:
    """A little is enough: sign(mu - z sigma), from all attackers; a shared coin where that is 0. Noise as `flip`."""
    return _noisy(_sent(votes, scene, _a_little(votes, scene)), scene)


def split(votes: Votes, scene: Scene) -> Votes:
    """As `alie`, but where it is close some attackers vote the other way: there their votes sum to `strength`.

    If the votes of k workers sum to P, two of them agree by (P^2 - k) / (k^2 - k) on average. So with a sum of
    sqrt(k) they look independent. The sum is P on average, who votes the other way changes from coordinate to
    coordinate, and close means that the tally may be contested.
    """
    pushed = _a_little(votes, scene)
    attackers = len(votes.workers) - scene.honest
    against = _against(scene, attackers, votes.n, _device(votes))
    v = _honest_sums(votes, scene).signs
    is_close = v.abs() <= math.isqrt(len(votes.workers)) + scene.strength + 1
    turns = [chances(coin, votes.n, _device(votes)) for coin in _coins(votes, scene, TURNS)]
    order = torch.stack(turns).argsort(0).argsort(0)
    where = [pack((place < against) & is_close) for place in order]
    return _sent(votes, scene, pushed ^ torch.stack(where))


def _against(scene: Scene, attackers: int, n: int, device: torch.device) -> Tensor:
    """How many attackers vote the other way on each coordinate, so that all sum to `strength` on average."""
    wanted = (attackers - min(scene.strength, attackers)) / 2
    drawn = chances(scene.coin(SUMS), n, device)
    return math.floor(wanted) + (drawn < wanted % 1).long()


def narrow(votes: Votes, scene: Scene) -> Votes:
    """sign(v), but -sign(v) where the attackers may overturn it; a shared coin where v = 0. Noise as `flip`."""
    v = _honest_sums(votes, scene).signs
    attackers = len(votes.workers) - scene.honest
    pushed = torch.where(v.abs() <= attackers, -v, v)
    signs = _signs_of(votes, scene, pushed)
    return _noisy(_sent(votes, scene, signs), scene)


def impostor(votes: Votes, scene: Scene) -> Votes:
    """sign(v) for 40 rounds, to look strong, then as `alie`, with a declared batch size of 1,000 times the true one."""
    return _bragging(votes, scene, alie)


def feint(votes: Votes, scene: Scene) -> Votes:
    """An impostor that continues as `split`."""
    return _bragging(votes, scene, split)


def _bragging(votes: Votes, scene: Scene, then: Callable[[Votes, Scene], Votes]) -> Votes:
    """sign(v) for 40 rounds, then another attack, with a declared batch size of 1,000 times the true one."""
    bragging = lie(votes, replace(scene, strength=BRAGGING))
    if scene.round > PATIENCE:
        return then(bragging, scene)
    v = _honest_sums(votes, scene).signs
    return _sent(bragging, scene, _signs_of(votes, scene, v))


def mimic(votes: Votes, scene: Scene) -> Votes:
    """The votes of the first honest worker; s if there is none."""
    if not scene.honest:
        return votes
    taking_part = _present(votes)[: scene.honest]
    first = taking_part.long().argmax()[None]
    copied = votes.planes.map(lambda plane: plane[first][0])
    return _sent(votes, scene, copied.signs, copied.support)


def oscillator(votes: Votes, scene: Scene) -> Votes:
    """s, but -sign(v) in every tenth round."""
    if scene.round % 10:
        return votes
    return anti(votes, scene)


def echo(votes: Votes, scene: Scene) -> Votes:
    """The decision of the previous round; s in the first round."""
    if scene.last is None:
        return votes
    return _sent(votes, scene, scene.last.signs, scene.last.support)


def push(votes: Votes, scene: Scene) -> Votes:
    """The opposite of the last decision, and the decision itself in a little less than half of the rounds; s at first.

    So what the server believes of an attacker under the rule `mean` is pushed by `strength` scales, and no further.
    """
    if scene.last is None:
        return votes
    share = (1 + scene.strength * (1 - LEAK)) / 2  # of the rounds
    is_against = int(scene.round * share) > int((scene.round - 1) * share)
    voted = everywhere(votes.n, _device(votes)) if scene.last.support is None else scene.last.support
    signs = scene.last.signs ^ voted if is_against else scene.last.signs
    return _sent(votes, scene, signs, scene.last.support)


def lie(votes: Votes, scene: Scene) -> Votes:
    """s, with a declared batch size of `strength` times the true one."""
    declared = list(votes.batch_sizes)
    for row in range(scene.honest, len(declared)):
        size = round(scene.strength * declared[row])
        declared[row] = min(LARGEST_BATCH, max(1, size))
    return replace(votes, batch_sizes=tuple(declared))


def label_flip(votes: Votes, scene: Scene) -> Votes:
    """s, from gradients on wrong labels: 9 - y for ten classes. See `Hostility.relabels`."""
    return votes


@dataclass(frozen=True)
class Attack:
    """An attack with its default and its largest strength; None: it has no strength."""

    act: Callable[[Votes, Scene], Votes]
    strength: float | None = None
    most: float = 1.0


ATTACKS: dict[str, Attack] = {
    "invert": Attack(invert),
    "flip": Attack(flip, 0.5),
    "random": Attack(random),
    "anti": Attack(anti),
    "alie": Attack(alie, 0.0, 0.5),
    "narrow": Attack(narrow, 0.0, 0.5),
    "split": Attack(split, 2.0, 1000.0),
    "impostor": Attack(impostor, 0.3, 0.5),
    "feint": Attack(feint, 2.0, 1000.0),
    "mimic": Attack(mimic),
    "clones": Attack(clones),
    "targeted": Attack(targeted, 0.1),
    "sleeper": Attack(anti),
    "oscillator": Attack(oscillator),
    "echo": Attack(echo),
    "push": Attack(push, 1.5, 1 / (1 - LEAK)),
    "label-flip": Attack(label_flip),
    "lie": Attack(lie, 100.0, 2.0**32),
}


# ---- planes --------------------------------------------------------------------------------------


def _device(votes: Votes) -> torch.device:
    return votes.planes.signs.device


def _coins(votes: Votes, scene: Scene, purpose: int) -> list[Coin]:
    """A coin for each attacker."""
    attackers = votes.workers[scene.honest :]
    return [scene.coin(purpose, worker) for worker in attackers]


def _chosen(votes: Votes, scene: Scene, coin: Coin) -> Tensor:
    """A plane: each coordinate with probability `strength`."""
    drawn = chances(coin, votes.n, _device(votes))
    return pack(drawn < scene.strength)


def _sent(votes: Votes, scene: Scene, signs: Tensor, support: Tensor | None = None) -> Votes:
    """Votes in which attackers send these planes, one for all or one each. Without support: on all coordinates."""
    attackers = len(votes.workers) - scene.honest

    def joined(old: Tensor, new: Tensor) -> Tensor:
        honest = old[: scene.honest]
        return torch.cat([honest, new.expand(attackers, -1)])

    planes = Planes(joined(votes.planes.signs, signs), None)
    old_support = votes.planes.support
    if old_support is None and support is None:
        return replace(votes, planes=planes)
    full = everywhere(votes.n, signs.device)
    if old_support is None:
        old_support = full.expand_as(votes.planes.signs)
    if support is None:
        support = full
    planes = planes._replace(support=joined(old_support, support))
    return replace(votes, planes=planes)


def _inverted(votes: Votes, scene: Scene, where: Tensor) -> Votes:
    """Votes in which attackers invert their own signs where they do vote."""
    own = votes.planes.map(lambda plane: plane[scene.honest :])
    if own.support is not None:
        where = where & own.support
    return _sent(votes, scene, own.signs ^ where, own.support)


def _a_little(votes: Votes, scene: Scene) -> Tensor:
    """A plane: sign(mu - z sigma), a shared coin where that is 0.

    mu and sigma are the mean and the deviation of the honest workers' *signs*, as gradients do not travel;
    an abstention counts as 0. z = Phi^-1((n - floor(n/2 + 1)) / (n - f)) for n voters of which f attack: the
    attackers and the honest workers beyond z sigma form a majority. z lies in [0, 4].
    """
    sums = _honest_sums(votes, scene)
    n = len(votes.workers)
    beyond = n - (n // 2 + 1)
    share = beyond / max(1, scene.honest)
    share = min(max(share, 0.5), 0.99996)
    z = NormalDist().inv_cdf(share)
    mu = sums.signs.double() / sums.workers
    variance = sums.cast / sums.workers - mu**2
    sigma = variance.clamp_min(0).sqrt()
    return _signs_of(votes, scene, mu - z * sigma)


def _noisy(votes: Votes, scene: Scene) -> Votes:
    """Votes in which each attacker inverts a share `strength` of its own, to look independent of the others."""
    return flip(votes, scene) if scene.strength else votes


def _bits(votes: Votes, coin: Coin) -> Tensor:
    """A plane of random bits."""
    device = _device(votes)
    bits = coin_words(coin, words_for(votes.n), device)
    return bits & everywhere(votes.n, device)


def _signs_of(votes: Votes, scene: Scene, values: Tensor) -> Tensor:
    """A plane: the sign of each value, a shared coin for a zero."""
    positive = pack(values > 0)
    ties = pack(values == 0)
    coin = scene.coin(TIES)
    return positive | (ties & _bits(votes, coin))


def _present(votes: Votes) -> Tensor:
    if votes.present is not None:
        return votes.present
    workers = len(votes.workers)
    return torch.ones(workers, dtype=torch.bool, device=_device(votes))


class HonestSums(NamedTuple):
    """Sums over the honest workers that take part in a round."""

    signs: Tensor  # (n,): v, the sum of their signs
    cast: Tensor  # (n,): votes cast
    workers: Tensor  # (): how many they are, at least 1


def _honest_sums(votes: Votes, scene: Scene) -> HonestSums:
    present = _present(votes)
    v = torch.zeros(votes.n, dtype=torch.int32, device=_device(votes))
    cast = torch.zeros_like(v)
    for row in range(scene.honest):
        select = partial(torch.select, dim=0, index=row)
        signs = unpack_signs(votes.planes.map(select), votes.n)
        v += signs * present[row]
        cast += signs.abs() * present[row]
    workers = present[: scene.honest].sum()
    return HonestSums(v, cast, workers.clamp_min(1))
