"""The default rule: declared sizes are the prior, evidence takes weight away, equal workers stay equal."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from signvote import Layout
from signvote.core.rules import learned, make_rule, vouched
from signvote.core.vote import Voters
from signvote.sim import Config
from tests.test_robust import honest, play

LAYOUT = Layout([("x", (4000,))])


def sizes_only(*sizes: int) -> list[float]:
    """The weights of workers without a record, relative to the first."""
    voters = Voters(workers=tuple(range(len(sizes))), batch_sizes=sizes)
    found = make_rule("weighted", LAYOUT).weights(voters)[:, 0].double()
    relative: list[float] = (found / found[0]).tolist()
    return relative


def test_declared_sizes_are_the_prior() -> None:
    assert sizes_only(4, 16, 64) == [1, 2, 4]
    assert sizes_only(4, 400) == [1, 10], "two are weighed by their sizes alone"
    assert sizes_only(4, 0, 16) == [1, 1, 1], "one that declares nothing: no size counts"
    assert sizes_only(0, 0) == [1, 1]
    assert sizes_only(1, 1, 10**8) == pytest.approx([1, 1, 4]), "not borne out by any record"
    ignoring = make_rule("weighted", LAYOUT, sizes=False)
    found = ignoring.weights(Voters(workers=(1, 2, 3), batch_sizes=(4, 16, 64)))
    assert len(set(found[:, 0].tolist())) == 1


@given(
    st.lists(st.floats(-10, 10), min_size=1, max_size=20),
    st.lists(st.floats(0.01, 100), min_size=20, max_size=20),
)
def test_evidence_only_takes_weight_away_from_a_declared_size(record: list[float], root: list[float]) -> None:
    l = torch.tensor(record).double()[:, None]  # noqa: E741
    size = torch.tensor(root[: len(record)]).double()[:, None]
    found = vouched(l, size)
    assert (found >= 0).all()
    assert (found <= size).all()
    lived_up = l / size >= (l.clamp_min(0) / size).median()
    assert torch.equal(found[lived_up], size[lived_up])


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=20), st.floats(0.75, 1.3))
def test_workers_with_nearly_the_same_record_have_the_same_weight(record: list[float], near: float) -> None:
    """A dead band: as wide as a factor of two, around the median."""
    typical = sorted(record)[(len(record) - 1) // 2]
    found = learned(torch.tensor([*record, typical * near]).double()[:, None])[:, 0]
    assert found.log2().frac().abs().max() == 0, "powers of two"
    assert 1.0 in found.tolist()
    order = torch.tensor(record).argsort()
    assert (found[:-1][order].diff() >= 0).all(), "a better record never weighs less"


def test_what_most_are_worth_nothing_teaches_nothing() -> None:
    record = torch.tensor([[-1.0], [-2.0], [3.0]])
    assert learned(record)[:, 0].tolist() == [1, 1, 1]
    root = torch.tensor([[1.0], [2.0], [3.0]])
    assert torch.equal(vouched(record, root), root)


@pytest.mark.parametrize(
    ("former", "today"), [("pooled", "weighted"), ("known-batch", "weighted"), ("agreement", "robust")]
)
def test_former_names_answer_with_the_rule_of_today(former: str, today: str) -> None:
    with pytest.warns(FutureWarning, match=f"the rule '{former}' is now '{today}'"):
        assert make_rule(former, LAYOUT).name == today
    with pytest.warns(FutureWarning, match="is now"):
        assert Config(task="mnist-10k", rule=former).rule == today


@pytest.mark.parametrize("m", [2, 3, 4, 5, 7, 15])
@pytest.mark.parametrize("p", [0.3, 0.4, 0.45])
@pytest.mark.parametrize("sizes", [True, False])
def test_equal_workers_stay_equal(m: int, p: float, sizes: bool) -> None:
    """Four equal noisy workers got a dictator under log((1-p)/p): the knife's edge of tests/test_few_voters.py."""
    torch.manual_seed(m)
    rule = make_rule("weighted", LAYOUT, sizes=sizes)
    for t in range(1, 60):
        play(rule, honest([p] * m, 4000), t, sizes=[64] * m)
        found = rule.weights(Voters(workers=tuple(range(m)), batch_sizes=(64,) * m))
        assert len(set(found[:, 0].tolist())) == 1


def test_a_worker_that_does_not_live_up_to_its_size_loses_weight() -> None:
    torch.manual_seed(1)
    rule = make_rule("weighted", LAYOUT)
    p = [0.4] * 9 + [0.7]
    sizes = [64] * 10
    for t in range(1, 60):
        play(rule, honest(p, 4000), t, sizes=sizes)
    found = rule.weights(Voters(workers=tuple(range(10)), batch_sizes=tuple(sizes)))[:, 0].double()
    assert found[9] < found[:9].min()


@pytest.mark.parametrize("seed", range(5))
def test_without_sizes_the_strong_worker_is_found(seed: int) -> None:
    """Mode 4 in miniature: one knows, fourteen guess."""
    torch.manual_seed(seed)
    rule = make_rule("weighted", LAYOUT)
    p = [0.47] * 14 + [0.1]
    for t in range(1, 100):
        play(rule, honest(p, 4000), t)
    found = rule.weights(Voters(workers=tuple(range(15))))[:, 0].double()
    assert found[14] > 4 * found[:14].max()
