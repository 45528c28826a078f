"""Tallies as bit planes: exact, in any order and any grouping, and checked on the wire."""

from __future__ import annotations

import struct
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from signvote import Ballot, BallotError, ConfigError, Layout, Tally
from signvote.core import tally as tally_module
from signvote.core.bits import pack_signs, unpack_signs
from signvote.core.wire import HEADER
from signvote.kernels import backend
from signvote.kernels.reference import unpack


class Case:
    """Some ballots with weights, and their tally written out."""

    def __init__(self, seed: int, *, ternary: bool, groups: bool, workers: int) -> None:
        random = torch.Generator().manual_seed(seed)
        shapes = torch.randint(1, 60, (1 + seed % 3,), generator=random).tolist()
        self.layout = Layout([(str(i), (size,)) for i, size in enumerate(shapes)])
        n = self.layout.size
        y = 2 * torch.randint(0, 2, (workers, n), generator=random) - 1
        if ternary:
            y *= torch.rand(workers, n, generator=random) < 0.7
        self.y = y
        self.groups = len(shapes) if groups else 1
        shift = seed % 5
        self.weights = torch.randint(-700, 700, (workers, self.groups), generator=random) << shift
        self.weights[torch.rand(workers, self.groups, generator=random) < 0.2] = 0
        self.ballots = [self.ballot(m) for m in range(workers)]
        lengths = torch.tensor(shapes if groups else [n])
        self.values = (self.weights.repeat_interleave(lengths, 1) * y).sum(0)

    def ballot(self, m: int) -> Ballot:
        planes, _ = pack_signs(self.y[m].float(), None)
        return Ballot.cast(self.layout, planes, worker=m, round=3, run=5)

    def empty(self) -> Tally:
        return Tally(self.layout, run=5, round=3, groups=self.groups)

    def tally(self, *rows: int) -> Tally:
        made = self.empty()
        made.add_all([self.ballots[row] for row in rows], self.weights[list(rows)])
        return made

    def read(self, message: bytes) -> Tally:
        return Tally.from_bytes(message, layout=self.layout, run=5, round=3, groups=self.groups)


cases = st.builds(
    Case,
    st.integers(0, 10_000),
    ternary=st.booleans(),
    groups=st.booleans(),
    workers=st.integers(1, 12),
)


@settings(max_examples=100)
@given(cases, st.data())
def test_any_order_any_parts_and_any_tree_of_merges_give_the_same_planes(
    case: Case, data: st.DataObject
) -> None:
    rows = data.draw(st.permutations(range(len(case.ballots))))
    whole = case.tally(*range(len(rows)))
    parts = [case.empty() for _ in range(data.draw(st.integers(1, 4)))]
    for row in rows:
        data.draw(st.sampled_from(parts)).add_all([case.ballots[row]], case.weights[row : row + 1])
    while len(parts) > 1:
        left = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        data.draw(st.sampled_from(parts)).merge(left)
    assert parts[0].to_bytes() == whole.to_bytes() == case.read(whole.to_bytes()).to_bytes()
    n = case.layout.size
    assert torch.equal(whole.values(0, n), case.values)
    assert torch.equal(unpack_signs(whole.compare(), n).long(), case.values.sign())
    signs, support = whole.compare()
    assert support is not None
    for plane in (signs, support):
        assert not unpack(plane, 64 * len(plane))[n:].any()


@pytest.mark.parametrize("block", [1, 8, 2**15])
def test_the_size_of_a_block_changes_nothing(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    case = Case(17, ternary=True, groups=True, workers=9)
    wanted = case.tally(*range(9)).to_bytes()
    monkeypatch.setattr(tally_module, "BLOCK", block)
    found = case.tally(*range(9))
    assert found.to_bytes() == wanted
    assert torch.equal(found.values(8, case.layout.size - 8), case.values[8:])


@settings(max_examples=30)
@given(cases)
def test_the_sign_is_that_of_the_kernels(case: Case) -> None:
    from signvote.core.vote import Votes, empty_decision

    votes = Votes.stack(case.ballots, 0, case.layout.size)
    out = empty_decision(votes.n, None)
    tally = case.tally(*range(len(case.ballots)))
    for g, span in enumerate(tally.spans):
        backend("cpu").vote_(out, votes.planes, case.weights[:, g].int().contiguous(), None, span)
    found = tally.compare()
    assert torch.equal(found.signs, out.signs)
    assert out.support is not None
    assert torch.equal(found.support, out.support)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("workers", "weight", "digits"), [(15, 1024, 4), (1000, 1024, 10), (15, 777, 14), (1, 1, 1)]
)
def test_as_many_planes_as_digits(workers: int, weight: int, digits: int) -> None:
    case = Case(3, ternary=False, groups=False, workers=1)
    tally = case.empty()
    tally.add_all(case.ballots * workers, torch.full((workers, 1), weight))
    assert len(tally.planes) == digits
    assert len(tally.to_bytes()) == HEADER.size + 3 * 8 + 8 + 1 + digits * -(-case.layout.size // 8)


def test_integers_can_be_added() -> None:
    case = Case(4, ternary=True, groups=False, workers=5)
    tally = case.tally(0, 1)
    rest = case.tally(2, 3, 4)
    bound = sum(rest.bounds)
    tally.add_values(rest.values(0, case.layout.size), bound)
    assert torch.equal(tally.values(0, case.layout.size), case.values)


def test_ballots_without_weight_add_nothing() -> None:
    case = Case(4, ternary=True, groups=False, workers=5)
    tally = case.empty()
    tally.add(case.ballots[0], 0)
    tally.merge(case.empty())
    assert tally.to_bytes() == case.empty().to_bytes() == case.read(tally.to_bytes()).to_bytes()
    assert not tally.values(0, case.layout.size).any()


def test_tallies_of_different_rounds_are_not_merged() -> None:
    layout = Layout([("a", (3,)), ("b", (4,))])
    one = Tally(layout, run=1, round=1)
    for other in (
        Tally(layout, run=2, round=1),
        Tally(layout, run=1, round=2),
        Tally(layout, run=1, round=1, groups=2),
    ):
        with pytest.raises(
            ConfigError, match="of different layouts, runs, rounds or groups cannot be merged"
        ):
            one.merge(other)


def test_weights_have_a_limit() -> None:
    case = Case(1, ternary=False, groups=False, workers=2)
    tally = case.empty()
    with pytest.raises(ConfigError, match=f"the weights sum up to {2**41}; a tally holds {2**40}"):
        tally.add(case.ballots[0], 2**41)
    assert tally.to_bytes() == case.empty().to_bytes()


# ---- damage --------------------------------------------------------------------------------------


def resealed(message: bytes) -> bytes:
    """With the checksum of what it says: for damage that is no accident."""
    zeroed = message[: HEADER.size - 4] + bytes(4)
    checksum = zlib.crc32(message[HEADER.size :], zlib.crc32(zeroed))
    return message[: HEADER.size - 4] + struct.pack("<I", checksum) + message[HEADER.size :]


@settings(max_examples=200)
@given(cases, st.data())
def test_a_damaged_tally_is_refused(case: Case, data: st.DataObject) -> None:
    """Whatever bit is flipped or byte lost. With a checksum that fits, it is refused or encodes back to itself."""
    message = case.tally(*range(len(case.ballots))).to_bytes()
    at = data.draw(st.integers(0, len(message) - 1))
    flipped = bytearray(message)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    for damaged in (bytes(flipped), message[:at], message + b"x"):
        with pytest.raises(BallotError):
            case.read(damaged)
    for damaged in (bytes(flipped), message[:at] + bytes(HEADER.size), message + b"x"):
        try:
            assert case.read(resealed(damaged)).to_bytes() == resealed(damaged)
        except BallotError as error:
            assert error.reason in ("header", "length", "padding")


def test_what_is_wrong_with_a_tally_is_said() -> None:
    case = Case(1, ternary=False, groups=True, workers=2)
    message = case.tally(0, 1).to_bytes()
    layout = case.layout
    wrong = {
        "a tally is bytes, not str": "text",
        "3 bytes are no tally; a header alone has 52": b"abc",
        "not a tally of this run, layout and round": b"x" + message[1:],
        "checksum mismatch: the tally was damaged on its way": message[:-1] + bytes([message[-1] ^ 1]),
        "the arrays of the tally do not fill it": resealed(message[:60]),
        "the tally has 1 bytes too many": resealed(message + b"x"),
    }
    for text, damaged in wrong.items():
        with pytest.raises(BallotError, match=text):
            case.read(damaged)  # type: ignore[arg-type]
    with pytest.raises(BallotError, match="a tally of 2 groups; wanted 1"):
        Tally.from_bytes(message, layout=layout, run=5, round=3)
    with pytest.raises(BallotError, match="not a tally of this run"):
        Tally.from_bytes(message, layout=layout, run=5, round=4, groups=2)
    planes = bytearray(message)
    planes[-1] |= 0x80
    assert layout.size % 8
    with pytest.raises(BallotError, match="bits of a tally are set beyond the last coordinate"):
        case.read(resealed(bytes(planes)))
    bounds = bytearray(message)
    bounds[HEADER.size + 8] ^= 0xFF
    bounds[HEADER.size + 9] ^= 0xFF
    with pytest.raises(BallotError, match=r"\d+ bytes in \d+ planes are not the digits of a tally"):
        case.read(resealed(bytes(bounds)))
