"""The bound of the rule `mean`: a worker that votes against the corrections of the others is not heard."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from signvote import Server
from signvote.core import loudness as loudness_module
from signvote.core.bits import unpack_signs
from signvote.core.discord import accord, compared
from signvote.core.loudness import ONE
from signvote.core.mean import Mean
from signvote.core.pairs import agreement
from signvote.core.vote import Votes, empty_decision
from signvote.kernels import Coin, Planes
from signvote.kernels.reference import pack
from tests.ranks import config
from tests.test_loudness import ROUNDS, loudness_of, right
from tests.test_mean import LAYOUT, Federation, M, N, both_ways


class Contradicted(Federation):
    """Workers of which the last one votes against the sum of the corrections of the others."""

    def __init__(self, bound: float | None = 1.5) -> None:
        super().__init__()
        self.server = Server(LAYOUT, "mean", bound=bound)
        self.honest = torch.zeros(N, dtype=torch.int32)
        for worker in self.workers:
            worker.encoder.encode = partial(self._encoded, worker.encoder.encode)  # type: ignore[method-assign]

    def _encoded(self, encode: Any, *args: Any, **more: Any) -> Any:
        planes = encode(*args, **more)
        if encode.__self__ is self.workers[-1].encoder:
            planes = planes._replace(signs=pack(self.honest < 0))
            self.honest.zero_()
        else:
            self.honest += unpack_signs(planes, N)
        return planes


def test_a_worker_that_votes_against_all_corrections_has_no_weight() -> None:
    shares = {}
    for bound in (None, 1.5):
        federation = Contradicted(bound)
        for t in range(1, ROUNDS):
            federation.round(t)
        shares[bound] = right(federation)
    found = loudness_of(federation.server)
    factors = found.factors(range(M))
    assert (factors[:-1] == ONE).all()
    assert factors[-1] < 0.1 * ONE
    differ, common = found.pairs.among(range(M))
    assert accord(agreement(differ, common)[0, 0])[-1] < 0.1  # however loud it is
    assert shares[None] < shares[1.5] - 0.1


@pytest.mark.parametrize("workers", [6, 30, 200])
def test_votes_against_the_sum_are_found_with_any_number_of_workers_and_copies(workers: int) -> None:
    signs = torch.randn(workers, 4096, generator=torch.Generator().manual_seed(2)).sign()
    hostile = workers // 4
    signs[-hostile:] = torch.where(signs[:-hostile].sum(0) < 0, 1.0, -1.0)
    factor = accord(_agreement(signs))
    assert (factor[:-hostile] == 1).all()
    assert (factor[-hostile:] < 0.1).all()
    order = torch.randperm(workers, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(accord(_agreement(signs[order])), factor[order])


def _agreement(signs: Tensor, at: Tensor | None = None) -> Tensor:
    differ, common = compared(signs, at)
    return agreement(differ.double(), common.double(), at)


def test_copies_cannot_take_the_weight_of_those_whom_they_contradict() -> None:
    signs = torch.randn(15, 4096, generator=torch.Generator().manual_seed(2)).sign()
    signs[-3:] = torch.where(signs[:3].sum(0) < 0, 1.0, -1.0)  # C is -1/2 with each of three
    factor = accord(_agreement(signs))
    assert (factor[:-3] == 1).all()
    assert (factor[-3:] < 0.8).all()


def test_one_worker_cannot_take_the_weight_of_many() -> None:
    """It contradicts one honest worker in all that it says, and so itself too."""
    signs = torch.randn(15, 4096, generator=torch.Generator().manual_seed(2)).sign()
    signs[-1] = -signs[0]
    assert (accord(_agreement(signs))[:-1] == 1).all()


def test_the_equations_of_the_page_are_who_is_heard() -> None:
    """docs/unlike-data.md by hand: C, d and f."""
    workers, rounds = 7, 12
    rule = Mean(LAYOUT, bound=1.5)
    assert rule.trust is not None
    agreed, common, h = torch.zeros(workers, workers), 0.0, torch.zeros(workers, N)
    for t in range(1, rounds):
        votes = _votes(workers, absent=workers, seed=t)
        rule.learn(rule.vote(empty_decision(N, Coin(t, 0)), votes, Coin(t, 0)))
        b = unpack_signs(votes.planes, N).float()
        agreed, common = 31 / 32 * agreed + b @ b.T, 31 / 32 * common + N
        h = 31 / 32 * h + b
    c = agreed / (common + 1000)
    loudness = h.abs().mean(1)
    f = torch.ones(workers)
    copies = [1 + sum(max(0.0, float(c[k, j])) for j in range(workers) if j != k) for k in range(workers)]
    for _ in range(3):
        v = [f[k] / copies[k] for k in range(workers)]
        d = torch.zeros(workers)
        for m in range(workers):
            others = [k for k in range(workers) if k != m]
            weighed = sum(v[k] * max(0.0, -float(c[m, k])) for k in others)
            d[m] = workers**0.5 * weighed / sum(v[k] for k in others)
        f = (0.35 / d).clamp_max(1) ** 4
    quiet = (1.5 / loudness).clamp_max(1) ** 2 * (3 / loudness).clamp_max(1) ** 2
    wanted = (f * quiet * ONE).clamp_min(1)
    assert torch.allclose(rule.trust.factors(range(workers)).float(), wanted, rtol=1e-3, atol=1)
    assert f[-1] < 0.5


def test_of_many_workers_some_are_witnesses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loudness_module, "WITNESSES", 6)
    rule = Mean(LAYOUT, bound=1.5)
    assert rule.trust is not None
    for t in range(1, 15):
        out = empty_decision(N, Coin(t, 0))
        evidence = rule.vote(out, _votes(9, absent=4, seed=t), Coin(t, 0)).sent()()
        assert evidence.differ is not None
        assert evidence.differ.shape == (8, 6)
        assert evidence.witnesses is not None
        assert 4 not in evidence.witnesses
        rule.learn(evidence)
    factors = rule.trust.factors(evidence.workers)
    assert (factors[:-1] > 5 * factors[-1]).all()


def _votes(workers: int, absent: int, seed: int) -> Votes:
    """Random votes; those of the last worker are against the sum of the others'."""
    signs = torch.randn(workers, N, generator=torch.Generator().manual_seed(seed)).sign()
    signs[-1] = -signs[:-1].sum(0)
    return Votes(
        workers=tuple(range(workers)),
        claims=torch.zeros(workers, len(LAYOUT.segments), dtype=torch.int8),
        planes=Planes(pack(signs > 0), None),
        n=N,
        present=torch.arange(workers) != absent,
    )


def test_the_joint_pass_hears_the_same_workers() -> None:
    case = config("mean", 6, 12, momentum=0.9, options={"bound": 1.5}, attack="anti:2")
    one, other = both_ways(case, 12)
    assert one.server is not None
    assert other.server is not None
    mine, its = loudness_of(one.server), loudness_of(other.server)
    assert torch.equal(mine.pairs.among(range(6)), its.pairs.among(range(6)))
    assert (mine.factors(range(4)) > mine.factors(range(4, 6)).max()).all()
