"""One suite that every rule must pass, through real ballots and a real server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from signvote import RULES, Ballot, ConfigError, Layout, Server, StateError, checkpoint
from signvote.core import chunks as chunks_module
from signvote.core.ballot import parse
from signvote.core.bits import Zeros, pack_signs, unpack_signs
from signvote.core.it_signsgd import ItSignSGD
from signvote.core.rule import Rule, WeightedRule
from signvote.core.rules import Weighted, make_rule, summary
from signvote.core.trust import Evidence
from signvote.core.vote import Voters, Votes, empty_decision
from signvote.kernels import Coin, Planes, reference

N = 300
LAYOUT = Layout([("a", (10, 13)), ("b", (70,)), ("c", (100,))])
OPTIONS: dict[str, dict[str, object]] = {
    "majority": {},
    "it-signsgd": {"warmup": 3},
    "weighted": {"forgetting": 0.9},
    "weighted without sizes": {"sizes": False},
    "weighted per tensor": {"per": "tensor"},
    "robust": {"sample": 128},
}
every_rule = pytest.mark.parametrize("name", OPTIONS)
zero_rules = pytest.mark.parametrize("zeros", ["coin", "abstain"])


def make_server(name: str, zeros: Zeros) -> Server:
    return Server(LAYOUT, name.split()[0], zeros=zeros, **OPTIONS[name])  # type: ignore[arg-type]


def signs(round: int, m: int = 7, *, ternary: bool) -> Tensor:
    """Signs of workers that get worse one by one."""
    generator = torch.Generator().manual_seed(round)
    flipped = torch.rand(m, N, generator=generator) < torch.linspace(0.05, 0.6, m)[:, None]
    y = 1 - 2 * flipped.long()
    return y * (torch.rand(m, N, generator=generator) < 0.8) if ternary else y


def message(y: Tensor, worker: int, round: int) -> bytes:
    planes, _ = pack_signs(y.float(), None)
    return Ballot.cast(LAYOUT, planes, worker=worker, round=round, run=0, batch_size=4 + worker).to_bytes()


def ballots(y: Tensor, round: int) -> dict[int, bytes]:
    return {m: message(row, m, round) for m, row in enumerate(y)}


def decision_of(data: bytes) -> Tensor:
    return unpack_signs(parse(data, layout=LAYOUT, run=0).planes(), N)


def run(server: Server, rounds: range, *, ternary: bool = False) -> list[bytes]:
    return [server.decide(t, ballots(signs(t, ternary=ternary), t)) for t in rounds]


def test_every_rule_is_in_the_suite() -> None:
    """Those whose votes are corrections have a suite of their own, test_mean.py."""
    assert {name.split()[0] for name in OPTIONS} == {name for name in RULES if not RULES[name].corrects}


@every_rule
@zero_rules
def test_workers_that_agree_are_obeyed(name: str, zeros: Zeros) -> None:
    server = make_server(name, zeros)
    for t in range(1, 8):
        truth = signs(t, 1, ternary=zeros == "abstain")
        decision = decision_of(server.decide(t, ballots(truth.expand(5, -1), t)))
        assert torch.equal(decision, truth[0].to(torch.int8))


@every_rule
@zero_rules
def test_the_order_of_arrival_changes_nothing(name: str, zeros: Zeros) -> None:
    one, other = make_server(name, zeros), make_server(name, zeros)
    for t in range(1, 8):
        sent = ballots(signs(t, ternary=True), t)
        assert one.decide(t, sent) == other.decide(t, reversed(sent.items()))


@every_rule
def test_flipping_every_ballot_flips_every_decision(name: str) -> None:
    one, other = make_server(name, "abstain"), make_server(name, "abstain")
    for t in range(1, 8):
        y = signs(t, ternary=True)
        a, b = one.decide(t, ballots(y, t)), other.decide(t, ballots(-y, t))
        assert torch.equal(decision_of(a), -decision_of(b))


@every_rule
@zero_rules
@pytest.mark.parametrize("size", [1, 7 * 8, 7 * 24])
def test_the_size_of_a_chunk_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str, zeros: Zeros, size: int
) -> None:
    whole = run(make_server(name, zeros), range(1, 8), ternary=True)
    monkeypatch.setattr(chunks_module, "STACK_BYTES", size)
    assert run(make_server(name, zeros), range(1, 8), ternary=True) == whole


@every_rule
def test_shards_decide_as_one_server(name: str) -> None:
    """Two rules that hold a part of the coordinates each, and share their evidence."""
    kind, cut = name.split()[0], 128
    spans = [(0, cut), (cut, N)]
    shards = [make_rule(kind, LAYOUT, **OPTIONS[name]) for _ in spans]
    for rule, span in zip(shards, spans, strict=True):
        rule.own([span])
    whole = make_rule(kind, LAYOUT, **OPTIONS[name])
    for t in range(1, 8):
        parsed = [parse(b, layout=LAYOUT, run=0) for b in ballots(signs(t, ternary=True), t).values()]
        pieces = [Votes.stack(parsed, a, b - a) for a, b in spans]
        outs = [empty_decision(v.n, None) for v in pieces]
        seen: list[Evidence] = [
            rule.vote(out, votes, None) for rule, out, votes in zip(shards, outs, pieces, strict=True)
        ]
        for rule in shards:
            rule.learn(seen[0] + seen[1])
        out = empty_decision(N, None)
        whole.learn(whole.vote(out, Votes.stack(parsed, 0, N), None))
        joined = torch.cat([unpack_signs(o, v.n) for o, v in zip(outs, pieces, strict=True)])
        assert torch.equal(joined, unpack_signs(out, N))


@every_rule
@zero_rules
def test_a_resumed_server_decides_bit_for_bit_as_the_uninterrupted_one(
    tmp_path: Path, name: str, zeros: Zeros
) -> None:
    undisturbed = make_server(name, zeros)
    expected = run(undisturbed, range(1, 12), ternary=True)
    saved = make_server(name, zeros)
    run(saved, range(1, 6), ternary=True)
    checkpoint.save(tmp_path / "server", saved.state_dict())
    run(saved, range(6, 9), ternary=True)  # what happens after saving does not reach the file
    resumed = make_server(name, zeros)
    resumed.load_state_dict(checkpoint.load(tmp_path / "server"))
    assert run(resumed, range(6, 12), ternary=True) == expected[5:]
    assert resumed.last_round == undisturbed.last_round == 11


@every_rule
@zero_rules
def test_workers_join_leave_and_return(name: str, zeros: Zeros) -> None:
    server = make_server(name, zeros)
    subsets = [range(7), [0, 1, 2, 3], [4, 5, 6], [], [2], range(9), [8, 3, 0], [6]]
    for t, present in enumerate(subsets, start=1):
        y = signs(t, 9, ternary=True)
        server.decide(t, {m: message(y[m], m, t) for m in present})
        assert server.report.voters == tuple(sorted(present))
        assert set(server.report.disagreement) == set(present)
    server.forget(6)
    server.forget(1234)
    server.decide(99, ballots(signs(99, ternary=True), 99))


@every_rule
def test_a_worker_marked_absent_changes_nothing(name: str) -> None:
    """`present` stays on the device: the decision and the evidence are those of the others."""
    kind = name.split()[0]
    y = signs(1, ternary=True)
    parsed = [parse(b, layout=LAYOUT, run=0) for b in ballots(y, 1).values()]
    there = torch.arange(7) != 2
    masked = replace(Votes.stack(parsed, 0, N), batch_sizes=(0,) * 7, present=there)
    others = replace(Votes.stack(parsed[:2] + parsed[3:], 0, N), batch_sizes=(0,) * 6)
    found = []
    for votes in (masked, others):
        out = empty_decision(N, None)
        seen = make_rule(kind, LAYOUT, **OPTIONS[name]).vote(out, votes, None)
        found.append((unpack_signs(out, N), seen.sent()()))
    (decision, evidence), (expected, expected_evidence) = found
    assert torch.equal(decision, expected)
    assert evidence.workers == expected_evidence.workers == (0, 1, 3, 4, 5, 6)
    assert torch.equal(evidence.mismatches, expected_evidence.mismatches)
    assert torch.equal(evidence.cast, expected_evidence.cast)


@every_rule
def test_weights_can_be_looked_at(name: str) -> None:
    server = make_server(name, "coin")
    run(server, range(1, 8))
    weights = server.rule.weights(Voters(workers=tuple(range(7)), batch_sizes=tuple(range(4, 11))))
    assert weights.dtype == torch.int32
    assert weights.shape[0] == 7
    assert weights.abs().max() <= 10_240
    if name in ("it-signsgd", "weighted without sizes"):
        believed = weights.double().mean(1)
        assert believed[0] > believed[3] > believed[6]


@pytest.mark.parametrize("name", ["majority", "weighted", "robust"])
def test_nobody_has_no_weight(name: str) -> None:
    assert make_rule(name, LAYOUT).weights(Voters(workers=())).shape == (0, 1)


@every_rule
def test_dense_and_abstaining_ballots_mix(name: str) -> None:
    """Some workers have no zero and send no support plane; it makes no difference."""
    server, obvious_server = make_server(name, "abstain"), make_server(name, "abstain")
    for t in range(1, 6):
        y = signs(t, ternary=True)
        y[::2] += y[::2] == 0
        sparse = {m: parse(b, layout=LAYOUT, run=0).thinned().to_bytes() for m, b in ballots(y, t).items()}
        decisions = server.decide(t, ballots(y, t)), obvious_server.decide(t, sparse)  # kinds may differ
        one, other = (unpack_signs(parse(d, layout=LAYOUT, run=0).planes(), LAYOUT.size) for d in decisions)
        assert torch.equal(one, other)


def test_states_of_another_rule_layout_or_shape_are_refused() -> None:
    state = make_rule("weighted", LAYOUT).state_dict()
    with pytest.raises(StateError, match="state of rule 'weighted' cannot be loaded into rule 'majority'"):
        make_rule("majority", LAYOUT).load_state_dict(state)
    other = Layout([("other", (N,))])
    with pytest.raises(StateError, match=f"layout '{LAYOUT.digest.hex()}' .* layout '{other.digest.hex()}'"):
        make_rule("weighted", other).load_state_dict(state)
    with pytest.raises(StateError, match="state of groups 1 cannot be loaded into groups 3"):
        make_rule("weighted", LAYOUT, per="tensor").load_state_dict(state)


def test_pooled_trust_is_a_number_per_worker_and_per_coordinate_trust_two_bytes() -> None:
    pooled, paper = make_server("weighted", "coin"), make_server("it-signsgd", "coin")
    for server in (pooled, paper):
        run(server, range(1, 4))
    assert pooled.rule.state_dict()["counts"].shape == (7, 2, 1)
    counters = paper.rule.state_dict()["counters"]
    assert counters.nbytes == 2 * 7 * 320  # 300 coordinates in five words of 64


def test_per_tensor_trust_knows_where_a_worker_is_good() -> None:
    server = make_server("weighted per tensor", "coin")
    for t in range(1, 6):
        truth = signs(t, 1, ternary=False)[0]
        y = truth.repeat(4, 1)
        y[3, 130:200] *= -1  # inverts tensor b only
        server.decide(t, ballots(y, t))
    assert isinstance(server.rule, Weighted)
    p = server.rule.trust.crossover([0, 3])
    assert p.tolist() == [[0, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize("zeros", ["coin", "abstain"])
@pytest.mark.parametrize("weight", [5, -5, 0])
@pytest.mark.parametrize("n", [1, 64, 100])
def test_one_worker_is_decided_on_as_any_number_is(zeros: Zeros, weight: int, n: int) -> None:
    """A vote of one is copied where the kernel would copy it."""

    class Fixed(WeightedRule):
        name = "fixed"

        def weights(self, voters: Voters) -> Tensor:
            return torch.full((len(voters.workers), 1), weight, dtype=torch.int32)

    x = torch.randn(n)
    x[0] = 0
    coin = Coin(7) if zeros == "coin" else None
    planes, _ = pack_signs(x, coin)
    votes = Votes(workers=(3,), planes=planes.map(lambda plane: plane[None]), n=n)
    found, wanted = (empty_decision(n, coin) for _ in range(2))
    evidence = Fixed(Layout([("w", (n,))])).vote(found, votes, coin)
    weights = torch.tensor([weight], dtype=torch.int32)
    wrong, cast = reference.vote_(wanted, votes.planes, weights, coin, (0, n))
    assert torch.equal(unpack_signs(found, n), unpack_signs(wanted, n))
    assert torch.equal(evidence.mismatches[:, 0], wrong)
    assert torch.equal(evidence.cast[:, 0], cast)


def test_every_rule_is_explained_in_two_lines() -> None:
    for name in RULES:
        lines = summary(name)
        assert len(lines) == 2, name
        assert all(20 < len(line) < 110 and line.endswith(".") for line in lines), lines


def test_unknown_names_and_options_get_a_hint() -> None:
    with pytest.raises(ConfigError, match=r"there is no rule 'weigted'; did you mean 'weighted'\?"):
        make_rule("weigted", LAYOUT)
    with pytest.raises(ConfigError, match=r"there is no rule 'zzz'\. All: majority, it-signsgd"):
        make_rule("zzz", LAYOUT)
    with pytest.raises(
        ConfigError, match="rule 'weighted' has no option warmup; it has: sizes, per, forgetting"
    ):
        make_rule("weighted", LAYOUT, warmup=3)
    with pytest.raises(ConfigError, match="rule 'majority' has no option per; it has: none"):
        make_rule("majority", LAYOUT, per="tensor")


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("weighted", {"per": "layer"}, "per is 'layer'; it must be 'worker' or 'tensor'"),
        ("it-signsgd", {"max_llr": 11}, r"max_llr is 11; it must lie in \(0, 10\]"),
        ("weighted", {"forgetting": 2}, "forgetting is 2"),
        ("it-signsgd", {"warmup": -1}, "warmup is -1"),
    ],
)
def test_settings_out_of_range(name: str, options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_rule(name, LAYOUT, **options)


def test_votes_outside_what_a_rule_owns_are_refused() -> None:
    rule = ItSignSGD(LAYOUT)
    rule.own([(64, 192)])
    for first, n in ((0, 64), (64 + 8, 64), (128, 128)):
        votes = Votes(
            workers=(1,), planes=Planes(torch.zeros(1, 2, dtype=torch.int64), None), n=n, first=first
        )
        with pytest.raises(ConfigError, match=r"in none of the ranges \[\(64, 192\)\]"):
            rule.vote(empty_decision(n, None), votes, None)


def test_weights_per_coordinate_are_of_the_coordinates_owned() -> None:
    """Without planes: of the whole layout, or of the ranges that are counted here."""
    whole, part = ItSignSGD(LAYOUT, warmup=0), ItSignSGD(LAYOUT, warmup=0)
    part.own([(64, 128), (192, N)])
    for t in range(1, 4):
        parsed = [parse(b, layout=LAYOUT, run=0) for b in ballots(signs(t, ternary=True), t).values()]
        for rule in (whole, part):
            for a, b in rule.ranges:
                seen = rule.vote(empty_decision(b - a, None), Votes.stack(parsed, a, b - a), None)
            rule.learn(seen)
    voters = Voters(workers=tuple(range(7)))
    everywhere = whole.weights(voters)
    assert everywhere.shape == (7, N)
    assert torch.equal(part.weights(voters), torch.cat([everywhere[:, 64:128], everywhere[:, 192:]], 1))
    assert whole.weights(Voters(workers=(3, 99))).shape == (2, N), "a new worker has weights, too"


@pytest.mark.parametrize("span", [(5, 64), (64, 70), (-64, 64), (256, 320), (128, 64)])
def test_what_a_rule_owns_is_whole_words(span: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=r"is no run of whole words of \(0, 300\)"):
        ItSignSGD(LAYOUT).own([span])


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_counters_are_shared_out_anew(world: int) -> None:
    """Counted by two, interleaved; gone on with by any number, also one that owns nothing."""
    halves, words = [[(0, 64), (128, 192)], [(64, 128), (192, N)]], -(-N // 64)
    counted = [ItSignSGD(LAYOUT, warmup=0) for _ in halves]
    whole = ItSignSGD(LAYOUT, warmup=0)
    for rule, ranges in zip(counted, halves, strict=True):
        rule.own(ranges)
    for t in range(1, 4):
        parsed = [parse(b, layout=LAYOUT, run=0) for b in ballots(signs(t, ternary=True), t).values()]
        for rule in (whole, *counted):
            for a, b in rule.ranges:
                seen = rule.vote(empty_decision(b - a, None), Votes.stack(parsed, a, b - a), None)
            rule.learn(seen)
    states = [rule.state_dict() for rule in counted]
    each = -(-words // world)
    for rank in range(world):
        a, b = 64 * each * rank, min(64 * each * (rank + 1), N)
        rule = ItSignSGD(LAYOUT, warmup=0)
        rule.own([(a, max(a, b))])
        rule.load_state_dict(*states)
        assert torch.equal(rule.trust.counters, whole.trust.counters[a // 64 : -(-b // 64)])
        votes = Votes.stack(parsed, a, max(0, b - a))
        cast = rule.vote(empty_decision(votes.n, None), votes, None).cast.sum(1)
        assert bool((cast > 0).all()) is (a < b)
    with pytest.raises(StateError, match="3 words of the coordinates counted here are in no state given"):
        ItSignSGD(LAYOUT).load_state_dict(states[0])


def test_a_rule_of_ones_own_is_a_class_with_weights() -> None:
    from signvote.core.rule import WeightedRule

    class FirstOnly(WeightedRule):
        name = "first-only"

        def weights(self, voters: Voters) -> Tensor:
            return torch.tensor([[1 if w == 0 else 0] for w in voters.workers], dtype=torch.int32)

    server = Server(LAYOUT, FirstOnly(LAYOUT))
    y = signs(1, ternary=False)
    assert torch.equal(decision_of(server.decide(1, ballots(y, 1))), y[0].to(torch.int8))
    state = server.state_dict()
    server.load_state_dict(state)
    assert isinstance(server.rule, Rule)
    assert Coin(1).after(5) == Coin(1, 5)
