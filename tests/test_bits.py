from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from signvote.core.bits import (
    SERVER,
    bytes_for,
    coin_for,
    count_ones,
    pack_signs,
    plane_from_bytes,
    plane_to_bytes,
    unpack_signs,
)
from signvote.errors import ConfigError
from signvote.kernels.reference import coin_words, unpack
from tests import reference as obvious


@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=300))
def test_unpacking_gives_the_signs_back(values: list[float]) -> None:
    x = torch.tensor(values)
    planes, _ = pack_signs(x, None)
    assert torch.equal(unpack_signs(planes, len(values)), torch.sign(x).to(torch.int8))


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 3, 4), (7, 0)])
def test_any_shape_even_none_at_all(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    planes, finite = pack_signs(x, None)
    assert finite
    assert torch.equal(unpack_signs(planes, x.numel()), torch.sign(x).to(torch.int8).flatten())


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.T,
        lambda x: x[:, ::2],
        lambda x: x[::3, 1:],
        lambda x: x.expand(4, *x.shape),
        lambda x: x.to(memory_format=torch.channels_last) if x.ndim == 4 else x.flip(0),
    ],
)
def test_strides_do_not_matter_and_nothing_is_written(view) -> None:  # type: ignore[no-untyped-def]
    base = torch.randn(9, 14)
    before = base.clone()
    x = view(base)
    planes, _ = pack_signs(x, None)
    assert torch.equal(unpack_signs(planes, x.numel()), torch.sign(x).flatten().to(torch.int8))
    assert torch.equal(base, before)


def test_the_bytes_of_a_plane_are_little_endian_bits() -> None:
    x = torch.randn(77)
    planes, _ = pack_signs(x, None)
    packed = plane_to_bytes(planes.signs, 77)
    assert packed.size == bytes_for(77) == 10
    assert obvious.bits_of(packed.tobytes(), 77) == (x > 0).int().tolist()
    assert np.array_equal(packed, np.packbits((x > 0).numpy(), bitorder="little"))
    assert count_ones(packed) == int((x > 0).sum())
    assert torch.equal(plane_from_bytes(packed, 77), planes.signs)


def test_integers_have_no_signs_here() -> None:
    with pytest.raises(
        ConfigError, match=r"signs of torch.int64 are not defined; wanted one of torch.float32"
    ):
        pack_signs(torch.arange(3), None)


def test_a_coin_depends_on_run_round_and_worker_and_nothing_else() -> None:
    keys = {
        coin_for("coin", run, round, worker) for run in range(9) for round in range(9) for worker in range(9)
    }
    assert len(keys) == 9**3
    assert coin_for("coin", 1, 2, 3) == coin_for("coin", 1, 2, 3)
    assert coin_for("coin", 1, 2) == coin_for("coin", 1, 2, SERVER)
    assert coin_for("abstain", 1, 2, 3) is None


def test_coins_are_fair_and_coordinates_independent() -> None:
    n = 64 * 20_000
    coin = coin_for("coin", 0, 1, 0)
    assert coin is not None
    bits = unpack(coin_words(coin, n // 64), n).double() - 0.5
    assert abs(bits.mean().item()) < 4 * 0.5 / n**0.5
    for lag in (1, 2, 7, 63, 64, 65):
        assert abs((bits[:-lag] * bits[lag:]).mean().item()) < 4 * 0.25 / n**0.5
    by_lane = bits.view(-1, 64).mean(0)
    assert by_lane.abs().max() < 5 * 0.5 / 20_000**0.5


def test_coins_of_rounds_workers_and_runs_are_independent() -> None:
    n = 64 * 1000
    streams = torch.stack(
        [
            unpack(coin_words(c, n // 64), n).double() * 2 - 1
            for c in (
                coin_for("coin", run, round, w) for run in (0, 1) for round in (1, 2) for w in (0, 1, SERVER)
            )
            if c is not None
        ]
    )
    correlation = (streams @ streams.T / n).fill_diagonal_(0)
    assert correlation.abs().max() < 5 / n**0.5


def test_a_shifted_coin_is_the_same_coin() -> None:
    coin = coin_for("coin", 0, 1, 0)
    assert coin is not None
    whole = unpack(coin_words(coin, 10), 640)
    for shift in (1, 63, 64, 100):
        assert torch.equal(unpack(coin_words(coin.after(shift), 5), 320), whole[shift : shift + 320])
