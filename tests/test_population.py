from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from signvote import ConfigError
from signvote.sim.population import (
    Sampler,
    generator,
    mode_batch_sizes,
    parse_absences,
    present,
    seeded,
    split,
)
from signvote.tasks import Data

LABELS = torch.arange(1000) % 10
DATA = Data(inputs=LABELS, labels=LABELS)


def test_the_batch_modes_of_the_paper() -> None:
    assert mode_batch_sizes(1) == [64] * 15
    assert mode_batch_sizes(2) == [4] * 9 + [154] * 6
    assert mode_batch_sizes(3) == [4] * 12 + [304] * 3
    assert mode_batch_sizes(4) == [4] * 14 + [904]


@pytest.mark.parametrize("workers", [1, 2, 5, 100])
@pytest.mark.parametrize("mode", [1, 2, 3, 4])
def test_modes_for_any_number_of_workers_and_samples(mode: int, workers: int) -> None:
    sizes = mode_batch_sizes(mode, workers, 1001)
    assert len(sizes) == workers
    assert sum(sizes) == 1001
    assert min(sizes) >= 1


def test_modes_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="mode is 5; it must be 1, 2, 3 or 4"):
        mode_batch_sizes(5)
    with pytest.raises(ConfigError, match="workers is 0; it must be 1 or more"):
        mode_batch_sizes(1, 0)
    with pytest.raises(ConfigError, match="50 samples a round are too few for 15 workers in mode 4"):
        mode_batch_sizes(4, 15, 50)


@pytest.mark.parametrize("how", ["iid", "dirichlet:0.5", "dirichlet:100", "labels:2"])
def test_a_split_is_a_partition(how: str) -> None:
    parts = split(DATA, 10, how, seed=3)
    together = torch.cat(parts)
    assert len(parts) == 10
    assert sorted(together.tolist()) == list(range(1000))
    assert all(torch.equal(a, b) for a, b in zip(parts, split(DATA, 10, how, seed=3), strict=True))


def test_what_the_splits_mean() -> None:
    assert all(len(part) == 1000 for part in split(DATA, 4, "shared", 0))
    assert {len(part) for part in split(DATA, 8, "iid", 0)} == {125}
    for part in split(DATA, 5, "labels:2", 0):
        assert len(set(LABELS[part].tolist())) == 2
    even, uneven = (
        torch.tensor([len(p) for p in split(DATA, 10, f"dirichlet:{a}", 0)]).double().std()
        for a in (1000, 0.3)
    )
    assert uneven > 3 * even
    assert not torch.equal(split(DATA, 4, "iid", 0)[0], split(DATA, 4, "iid", 1)[0])


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("even", "split is 'even'; it must be shared, iid, dirichlet:A or labels:K"),
        ("iid:3", "split is 'iid:3'"),
        ("dirichlet:", "the number after the colon must be above 0"),
        ("dirichlet:-1", "the number after the colon must be above 0"),
        ("labels:x", "the number after the colon must be above 0"),
        ("labels:2.5", r"split is 'labels:2.5'; K must be an integer in 1\.\.10, the labels of the task"),
        ("labels:11", "K must be an integer in"),
    ],
)
def test_splits_that_cannot_be(how: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        split(DATA, 3, how, 0)


def test_nobody_is_left_without_a_sample() -> None:
    with pytest.raises(ConfigError, match="leaves worker 3 without a sample"):
        split(Data(inputs=torch.zeros(3)), 5, "iid", 0)


def test_a_sampler_goes_through_all_samples_before_it_repeats_one() -> None:
    sampler = Sampler([torch.arange(100, 130)] * 2, [7, 30], seed=1)
    drawn = torch.cat([sampler.batch(0, t) for t in range(30)])
    for epoch in drawn.view(7, 30):
        assert sorted(epoch.tolist()) == list(range(100, 130))
    assert sampler.batch(1, 0).tolist() != sampler.batch(1, 1).tolist()
    again = Sampler([torch.arange(100, 130)] * 2, [7, 30], seed=1)
    assert torch.equal(again.batch(0, 17), sampler.batch(0, 17)), "a batch depends on no other"


def test_a_batch_cannot_be_larger_than_the_data() -> None:
    with pytest.raises(
        ConfigError, match=r"worker 1 has a batch size of 31; it must lie in 1\.\.30, the training"
    ):
        Sampler([torch.arange(30)] * 2, [4, 31], seed=0)
    with pytest.raises(ConfigError, match="worker 0 has a batch size of 0"):
        Sampler([torch.arange(30)], [0], seed=0)


def test_presence() -> None:
    away = parse_absences(["0:1:10", "2:5"], workers=4)
    assert present(1, 4, 0.0, away, 0) == [1, 2, 3]
    assert present(7, 4, 0.0, away, 0) == [1, 3]
    assert present(11, 4, 0.0, away, 0) == [0, 1, 3]
    assert present(1, 4, 1.0, away, 0) == []
    shares = sum(len(present(t, 10, 0.3, [], 5)) for t in range(1000)) / 10_000
    assert abs(shares - 0.7) < 4 * (0.21 / 10_000) ** 0.5
    assert present(3, 10, 0.5, [], 5) == present(3, 10, 0.5, [], 5)


@pytest.mark.parametrize("text", ["x", "1", "1:2:3:4", "9:1:2", "0:5:4", "-1:1:2"])
def test_absences_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match=r"wanted WORKER:FROM\[:TO\] with a worker in 0\.\.3"):
        parse_absences([text], workers=4)


def test_generators_depend_on_all_their_numbers() -> None:
    first = {
        torch.rand(1, generator=generator(*parts)).item() for parts in [(0,), (1,), (0, 1), (1, 0), (0, 0, 1)]
    }
    assert len(first) == 5


@given(owned=st.integers(1, 40), size=st.integers(1, 100), t=st.integers(0, 20))
def test_a_worker_that_owns_few_samples_repeats_them(owned: int, size: int, t: int) -> None:
    """However large its batches are, it draws each of its samples once before it draws one again."""
    sampler = Sampler([torch.arange(owned), torch.arange(owned, 140)], [size, 1], seed=2)
    drawn = torch.cat([sampler.batch(0, s) for s in range(t + 1)])
    assert len(sampler.batch(0, t)) == size
    for epoch in torch.split(drawn, owned):
        assert len(set(epoch.tolist())) == len(epoch)


def test_seeded_numbers_are_those_of_the_seed_and_leave_the_others_alone() -> None:
    torch.manual_seed(1)
    after = torch.rand(3)
    torch.manual_seed(1)
    with seeded(torch.device("cpu"), 5, 6):
        found = torch.rand(3)
    assert torch.equal(torch.rand(3), after)
    torch.manual_seed(generator(5, 6).initial_seed())
    assert torch.equal(found, torch.rand(3))
