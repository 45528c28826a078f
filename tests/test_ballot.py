from __future__ import annotations

import math
import struct
import tracemalloc
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from signvote import Ballot, BallotError, Layout, SignVoteError
from signvote.core.ballot import parse
from signvote.core.bits import Bytes, pack_signs
from signvote.core.header import HEADER, Kind
from signvote.core.sparse import body_bytes, decode_body, encode_body, most_bytes, pays, rice_parameter
from signvote.kernels import Coin, Planes
from signvote.kernels.reference import pack
from tests import reference as obvious

RUN, ROUND, WORKER = 2**63 + 5, 77, 2**40 + 1


def layout_of(n: int) -> Layout:
    return Layout([("x", (n,))])


def ballot(values: torch.Tensor, kind: Kind = Kind.DENSE) -> Ballot:
    planes, _ = pack_signs(values, None if kind else Coin(3))
    made = Ballot.cast(layout_of(values.numel()), planes, worker=WORKER, round=ROUND, run=RUN, batch_size=64)
    return made.thinned() if kind is Kind.SPARSE else made


def read(message: bytes, n: int) -> Ballot:
    return parse(message, layout=layout_of(n), run=RUN, round=ROUND, worker=WORKER)


def signed(message: bytes) -> bytes:
    """The message with a checksum that fits: only then the other checks are reached."""
    message = message[:60] + bytes(4) + message[64:]
    return message[:60] + struct.pack("<I", zlib.crc32(message)) + message[64:]


@given(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=1, max_size=400), st.sampled_from(list(Kind)))
def test_a_ballot_survives_the_wire(values: list[float], kind: Kind) -> None:
    x = torch.tensor(values)
    sent = ballot(x, kind)
    message = sent.to_bytes()
    got = read(message, len(values))
    assert (got.worker, got.round, got.run, got.batch_size, got.kind) == (WORKER, ROUND, RUN, 64, sent.kind)
    assert got.count == sent.count
    for a, b in zip(got.planes(), sent.planes(), strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or torch.equal(a, b)
    if kind:
        assert obvious.signs_in(got.planes(), len(values)) == x.int().tolist()
    assert got.to_bytes() == message


@pytest.mark.parametrize("n", [1, 7, 8, 9, 1000])
def test_a_dense_ballot_is_a_header_and_the_bits(n: int) -> None:
    assert HEADER.size == 64
    x = torch.randn(n)
    message = ballot(x).to_bytes()
    assert len(message) == 64 + math.ceil(n / 8)
    assert obvious.bits_of(message[64:], n) == (x > 0).int().tolist()


def test_a_support_plane_is_sent_only_when_needed() -> None:
    assert ballot(torch.randn(100), Kind.ABSTAIN).kind is Kind.DENSE
    assert ballot(torch.zeros(100), Kind.ABSTAIN).kind is Kind.ABSTAIN
    assert len(ballot(torch.zeros(100), Kind.ABSTAIN).to_bytes()) == 64 + 2 * 13


@pytest.mark.parametrize("density", [0.01, 0.1])
def test_a_sparse_ballot_costs_the_entropy_and_little_more(density: float) -> None:
    n = 1_000_000
    count = int(density * n)
    x = torch.zeros(n)
    x[torch.randperm(n)[:count]] = torch.randn(count)
    size = len(ballot(x, Kind.SPARSE).to_bytes())
    choose = math.lgamma(n + 1) - math.lgamma(count + 1) - math.lgamma(n - count + 1)
    bound = (choose / math.log(2) + count) / 8  # which coordinates, and a sign for each
    assert bound < size < 1.02 * bound  # 10 % were allowed


def packed(bits: list[int]) -> bytes:
    return np.packbits(np.array(bits, np.uint8), bitorder="little").tobytes()


def body_of(votes: dict[int, int], n: int) -> bytes:
    """A sparse body, gap by gap: coordinate -> sign, 1 or 0."""
    if not votes:
        return b""
    unary: list[int] = []
    remainders: list[int] = []
    k, last = rice_parameter(n, len(votes)), -1
    for index in sorted(votes):
        quotient, remainder = divmod(index - last - 1, 2**k)
        unary += [0] * quotient + [1]
        remainders += [remainder >> bit & 1 for bit in range(k)]
        last = index
    return packed(unary) + packed(remainders) + packed([votes[index] for index in sorted(votes)])


def planes_of(votes: dict[int, int], n: int) -> tuple[Bytes, Bytes]:
    signs, support = np.zeros((2, n), np.uint8)
    for index, sign in votes.items():
        signs[index], support[index] = sign, 1
    return np.packbits(signs, bitorder="little"), np.packbits(support, bitorder="little")


def check_body(votes: dict[int, int], n: int) -> None:
    """The body is the obvious one, no longer than the bound, and both ways lead to the same votes."""
    signs, support = planes_of(votes, n)
    body = encode_body(signs, support, n)
    assert body == body_of(votes, n)
    assert len(body) <= most_bytes(n, len(votes))
    for got, wanted in zip(
        decode_body(np.frombuffer(body, np.uint8), n, len(votes)), (signs, support), strict=True
    ):
        assert got.tolist() == wanted.tolist()


@given(st.integers(1, 5000), st.data())
def test_sparse_bodies(n: int, data: st.DataObject) -> None:
    check_body(data.draw(st.dictionaries(st.integers(0, n - 1), st.integers(0, 1), max_size=200)), n)


@given(st.integers(1, 300), st.sampled_from([0.05, 0.3, 0.5, 0.6, 1.0]), st.integers(0, 2**31))
def test_sparse_bodies_of_every_density(n: int, share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    voted = np.flatnonzero(rng.random(n) < share).tolist()
    check_body({index: int(rng.integers(2)) for index in voted}, n)


@pytest.mark.parametrize("gap", [1, 2, 3, 1000])
def test_sparse_bodies_of_many_blocks(gap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Indices, remainders and signs cross the borders of blocks, and blocks without any index lie between."""
    monkeypatch.setattr("signvote.core.sparse.BLOCK_BYTES", 5)
    rng = np.random.default_rng(gap)
    near = np.flatnonzero(rng.random(1000) < 1 / gap).tolist()
    for n in (1000, 1003, 9001):
        check_body({index: int(rng.integers(2)) for index in [*near, n - 1]}, n)


def test_the_remainder_follows_the_density() -> None:
    assert [rice_parameter(1000, count) for count in (1, 10, 100, 501, 1000)] == [9, 6, 3, 0, 0]


def test_the_longest_body_is_the_longest() -> None:
    """Every set of coordinates, for every n up to 12."""
    for n in range(1, 13):
        longest = [0] * (n + 1)
        for chosen in range(2**n):
            votes = {index: 1 for index in range(n) if chosen >> index & 1}
            longest[len(votes)] = max(longest[len(votes)], len(body_of(votes, n)))
        assert [most_bytes(n, count) for count in range(n + 1)] == longest


@given(st.integers(1, 300), st.data())
def test_a_sparse_ballot_is_never_longer_than_another_form(n: int, data: st.DataObject) -> None:
    """Who writes one where another form is shorter is refused by the count, before the body is read."""
    count = data.draw(
        st.integers(0, n) | st.sampled_from(sorted({n // 2, n // 2 + 1, n - 1, n} & {*range(n + 1)}))
    )
    voted = torch.zeros(n)
    voted[torch.randperm(n)[:count]] = 1.0
    other = ballot(voted, Kind.ABSTAIN)
    thin = other.thinned()
    assert len(thin.to_bytes()) <= len(other.to_bytes())
    assert read(thin.to_bytes(), n).to_bytes() == thin.to_bytes()
    assert (thin.kind is Kind.SPARSE) == pays(n, count)
    support = other.support
    if support is None:
        support = np.packbits(np.ones(n, np.uint8), bitorder="little")
    forced = replace(other, kind=Kind.SPARSE, support=support).to_bytes()
    if pays(n, count):
        assert read(forced, n).to_bytes() == forced
    else:
        with pytest.raises(
            BallotError, match=f"sparse ballot of {count} votes on {n} .* another form"
        ) as error:
            read(forced, n)
        assert error.value.reason == "count"


def test_what_a_sparse_ballot_may_name() -> None:
    assert [pays(1000, count) for count in (0, 1, 500, 501, 999, 1000)] == [True] * 5 + [False]


def field(message: bytes, offset: int, form: str, value: int) -> bytes:
    packed = struct.pack(form, value)
    return signed(message[:offset] + packed + message[offset + len(packed) :])


DENSE = ballot(torch.randn(77)).to_bytes()
PARTIAL = ballot(torch.randn(77) * (torch.arange(77) % 3), Kind.ABSTAIN).to_bytes()
SPARSE = ballot(torch.randn(77) * (torch.arange(77) % 9 == 0), Kind.SPARSE).to_bytes()
MOST = ballot(torch.randn(77) * (torch.arange(77) % 9 != 0), Kind.SPARSE).to_bytes()
BUT_ONE = ballot(torch.randn(77) * (torch.arange(77) != 40), Kind.SPARSE).to_bytes()
CORRECT = replace(ballot(torch.randn(77)), kind=Kind.CORRECT, claims=np.array([-3], np.int8)).to_bytes()
SCALED = replace(ballot(torch.randn(77)), kind=Kind.SCALED, claims=np.array([-3], np.int8)).to_bytes()
EMPTY = replace(ballot(torch.zeros(77), Kind.SPARSE), reason=1).to_bytes()

BAD = {
    "empty": (b"", "length", "0 bytes are no ballot; a header alone has 64"),
    "short header": (DENSE[:63], "length", "63 bytes are no ballot"),
    "magic": (b"GRAD" + DENSE[4:], "magic", "not a ballot: it starts with b'GRAD'"),
    "version": (field(DENSE, 4, "B", 2), "version", "ballot of version 2; this program reads version 1"),
    "kind": (field(DENSE, 5, "B", 5), "kind", "unknown kind 5"),
    "reason": (field(EMPTY, 6, "B", 9), "kind", "reason 9"),
    "reserved": (field(DENSE, 7, "B", 1), "kind", "reserved byte 1"),
    "voting though abstaining": (field(SPARSE, 6, "B", 1), "kind", "non-finite gradient.* cannot vote"),
    "run": (field(DENSE, 8, "<Q", 1), "run", f"ballot of run 1; this is run {RUN}"),
    "layout": (field(DENSE, 16, "<Q", 1), "layout", "another model"),
    "worker": (field(DENSE, 32, "<Q", 3), "worker", f"worker {WORKER} sent a ballot in the name of 3"),
    "late": (field(DENSE, 40, "<Q", 76), "late", "ballot for round 76; this is round 77"),
    "future": (field(DENSE, 40, "<Q", 78), "future", "ballot for round 78; this is round 77"),
    "count": (field(DENSE, 48, "<Q", 76), "count", "dense ballot of 76 votes; the layout has 77"),
    "huge dense": (field(DENSE, 48, "<Q", 2**40), "count", "1099511627776 votes"),
    "huge partial": (field(PARTIAL, 48, "<Q", 2**40), "count", "1099511627776 votes"),
    "huge sparse": (field(SPARSE, 48, "<Q", 2**40), "count", "1099511627776 votes"),
    "cut": (signed(DENSE[:-1]), "length", "dense body of 9 bytes; wanted 10"),
    "long": (signed(DENSE + b"\0"), "length", "dense body of 11 bytes; wanted 10"),
    "long partial": (signed(PARTIAL + b"\0"), "length", "abstain body of 21 bytes; wanted 20"),
    "long sparse": (signed(SPARSE + bytes(99)), "length", r"sparse body of \d+ bytes; wanted \d+ to \d+"),
    "body though empty": (signed(EMPTY + b"\0"), "length", "sparse body of 1 bytes; wanted 0"),
    "checksum": (DENSE[:-1] + bytes([DENSE[-1] ^ 1]), "checksum", "damaged on its way"),
    "padding": (signed(DENSE[:-1] + bytes([DENSE[-1] | 128])), "padding", "padding bits are not zero"),
    "partial padding": (
        signed(PARTIAL[:73] + bytes([PARTIAL[73] | 128]) + PARTIAL[74:]), "padding", "padding bits"
    ),
    "sign without a vote": (signed(PARTIAL[:74] + bytes([255]) + PARTIAL[75:]), "padding", "no vote"),
    "votes miscounted": (field(PARTIAL, 48, "<Q", 50), "count", r"\d+ votes in the ballot, 50 in its header"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_each_defect_has_its_own_refusal(name: str) -> None:
    message, reason, text = BAD[name]
    with pytest.raises(BallotError, match=text) as error:
        read(message, 77)
    assert error.value.reason == reason


def test_sparse_padding_and_range_are_checked() -> None:
    x = torch.zeros(77)
    x[[5, 76]] = 1.0
    good = ballot(x, Kind.SPARSE).to_bytes()
    with pytest.raises(BallotError, match="padding bits are not zero"):
        read(signed(good[:-1] + bytes([good[-1] | 4])), 77)
    with pytest.raises(BallotError, match="padding bits of the index code"):
        read(signed(good[:-2] + bytes([good[-2] | 128]) + good[-1:]), 77)
    with pytest.raises(BallotError, match="the index code holds 3 indices, not the 2 declared"):
        read(signed(good[:64] + bytes([good[64] | 2]) + good[65:]), 77)
    beyond = body_of({5: 1, 78: 1}, 79)
    assert rice_parameter(79, 2) == rice_parameter(77, 2)
    with pytest.raises(BallotError, match="index 78 is out of range; the layout has 77") as error:
        read(signed(good[:64] + beyond), 77)
    assert error.value.reason == "index"


def test_padding_and_range_are_checked_where_most_coordinates_are_voted_on() -> None:
    signs = -(-68 // 8)
    last = len(MOST) - signs - 1  # of the index code
    assert (MOST[5], MOST[48]) == (Kind.SPARSE, 68)
    with pytest.raises(BallotError, match="padding bits are not zero"):
        read(signed(MOST[:-1] + bytes([MOST[-1] | 128])), 77)
    with pytest.raises(BallotError, match="the index code holds 69 indices, not the 68 declared"):
        read(signed(MOST[:64] + bytes([MOST[64] | 1]) + MOST[65:]), 77)
    moved = MOST[last] & ~2 | 1 << 5  # coordinate 73 becomes 77
    with pytest.raises(BallotError, match="an index is out of range; the layout has 77") as error:
        read(signed(MOST[:last] + bytes([moved]) + MOST[last + 1 :]), 77)
    assert error.value.reason == "index"


@pytest.mark.parametrize("kind", Kind)
def test_a_server_may_refuse_a_form(kind: Kind) -> None:
    messages = {
        Kind.DENSE: DENSE,
        Kind.ABSTAIN: PARTIAL,
        Kind.SPARSE: SPARSE,
        Kind.CORRECT: CORRECT,
        Kind.SCALED: SCALED,
    }
    others = [each for each in Kind if each is not kind]
    accepted = ", ".join(each.name.lower() for each in others)
    with pytest.raises(
        BallotError, match=f"{kind.name.lower()} ballot; this server accepts {accepted}"
    ) as error:
        parse(messages[kind], layout=layout_of(77), run=RUN, kinds=others)
    assert error.value.reason == "kind"
    assert parse(messages[kind], layout=layout_of(77), run=RUN, kinds=[kind]).kind is kind
    assert parse(EMPTY, layout=layout_of(77), run=RUN, kinds=[kind]).reason, (
        "an abstention is always accepted"
    )


@pytest.mark.parametrize("share", [0.01, 0.5, 0.999])
def test_a_sparse_ballot_needs_little_memory(share: float) -> None:
    """Two planes of N/8 bytes and the arrays of a block, either way: it was 41 bytes a coordinate."""
    n = 4_000_000
    voted = np.random.default_rng(0).random(n, np.float32) < share
    support = np.packbits(voted, bitorder="little")
    sent = Ballot(
        layout=layout_of(n),
        worker=WORKER,
        round=ROUND,
        run=RUN,
        kind=Kind.SPARSE,
        signs=support,
        support=support,
    )
    tracemalloc.start()
    message = sent.to_bytes()
    got = read(message, n)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(got.signs, support)
    assert peak < 2 * n


def test_nothing_large_is_allocated_for_a_lie() -> None:
    lies = [field(m, 48, "<Q", 2**40) for m in (DENSE, PARTIAL, SPARSE)]
    tracemalloc.start()
    for lie in lies:
        with pytest.raises(BallotError):
            read(lie, 77)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def test_only_bytes_are_read() -> None:
    with pytest.raises(BallotError, match="a ballot is bytes, not NoneType"):
        read(None, 77)  # type: ignore[arg-type]


def test_a_round_or_worker_left_open_takes_any() -> None:
    assert parse(DENSE, layout=layout_of(77), run=RUN).worker == WORKER


@pytest.mark.slow
def test_mutated_ballots() -> None:
    check_mutated_ballots(100_000)


def check_mutated_ballots(mutants: int) -> None:
    """No crash, no foreign exception; whatever is accepted is a ballot that encodes to the same bytes.

    Half of the mutants get a checksum that fits, so that the checks behind it are reached too.
    """
    rng = np.random.default_rng(0)
    n, layout, refusals, accepted = 77, layout_of(77), set(), 0
    originals = [DENSE, PARTIAL, SPARSE, EMPTY, MOST, BUT_ONE]
    places = rng.integers(0, 2**31, (mutants, 6))
    for i, (which, how, at, value, second, more) in enumerate(places.tolist()):
        message = bytearray(originals[which % 6])
        if how % 8 == 0:
            del message[at % len(message) :]
        elif how % 8 == 1:
            message += bytes([value % 256]) * (1 + more % 20)
        elif how % 8 == 2:
            other = originals[value % 6]
            cut = at % min(len(message), len(other))
            message[cut:] = other[cut:]
        else:
            message[at % len(message)] ^= 1 + value % 255
            if how % 8 > 5:
                message[64 + second % max(1, len(message) - 64) if len(message) > 64 else 5] ^= 1 + more % 255
        mutant = bytes(message)
        if i % 2 and len(mutant) >= 64:
            mutant = signed(mutant)
        try:
            got = parse(mutant, layout=layout, run=RUN, round=ROUND, worker=WORKER)
        except SignVoteError as error:
            assert isinstance(error, BallotError)
            refusals.add(error.reason)
        else:
            accepted += 1
            assert got.to_bytes() == mutant
            assert got.signs.size == math.ceil(n / 8)
    assert refusals == {
        "length", "magic", "version", "kind", "layout", "run", "late", "future", "worker", "count",
        "checksum", "padding", "index",
    }  # fmt: skip
    assert accepted > 1000  # a sign flipped, a batch size changed: ballots like any other


@given(st.integers(1, 300), st.integers(0, 2**31), st.floats(0, 1))
def test_the_size_of_a_sparse_body_is_known_before_it_is_written(n: int, seed: int, share: float) -> None:
    random = torch.Generator().manual_seed(seed)
    voted = torch.rand(3, n, generator=random) < torch.tensor([[share], [share / 10], [1.0]])
    for row, size in zip(voted, body_bytes(pack(voted), n).tolist(), strict=True):
        planes = Planes(pack(row), pack(row))
        ballot = Ballot.cast(layout_of(n), planes, worker=1, round=1, run=0).thinned()
        assert len(ballot.to_bytes()) == 64 + size
