"""Each attack is what it is defined to be, from any votes, and the same both ways of running."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import Tensor

from signvote import ConfigError
from signvote.core.bits import pack_signs, unpack_signs
from signvote.core.vote import Votes
from signvote.kernels import Planes
from signvote.kernels.reference import pack
from signvote.sim import Config, Run, train
from signvote.sim.attacks import ATTACKS
from signvote.sim.hostility import Hostility, parse_attack, stacked
from signvote.sim.joint.together import Together
from signvote.sim.machine import Machine
from signvote.tasks import Task

N, M = 20_000, 7
STRENGTHS = {"flip": "flip=0.3", "lie": "lie=50"}
zero_rules = pytest.mark.parametrize("ternary", [False, True])


def attack(text: str, workers: int = M) -> Hostility:
    found = parse_attack(text, workers)
    assert found is not None
    return found


def signs(*, ternary: bool, m: int = M) -> Tensor:
    """+1 with probability 0.6; 0 for a fifth of them."""
    y = torch.where(torch.rand(m, N) < 0.6, 1, -1)
    return y * (torch.rand(m, N) < 0.8) if ternary else y


def votes_of(y: Tensor, present: list[bool] | None = None) -> Votes:
    partial = pack(y != 0) if bool((y == 0).any()) else None
    return Votes(
        workers=tuple(range(len(y))), planes=Planes(pack(y > 0), partial), n=y.shape[1],
        batch_sizes=tuple(range(4, 4 + len(y))), present=None if present is None else torch.tensor(present),
    )  # fmt: skip


def sent(text: str, y: Tensor, round: int = 1, last: Planes | None = None, **more: Any) -> Tensor:
    """What is sent after an attack; honest workers are not touched."""
    hostility = attack(text, len(y))
    changed = hostility.change(votes_of(y, **more), seed=0, round=round, last=last)
    found = unpack_signs(changed.planes, N)
    assert torch.equal(found[: hostility.first], y[: hostility.first].to(torch.int8))
    return found[hostility.first :].long()


@zero_rules
def test_invert_is_the_opposite_of_every_sign(ternary: bool) -> None:
    y = signs(ternary=ternary)
    assert torch.equal(sent("invert:2", y), -y[-2:])


@zero_rules
def test_flip_inverts_each_sign_with_a_probability(ternary: bool) -> None:
    y = signs(ternary=ternary)
    found = sent("flip=0.3:2", y)
    assert torch.equal(found.abs(), y[-2:].abs()), "who abstains still does"
    cast = int((y[-2:] != 0).sum())
    assert abs(int((found != y[-2:]).sum()) / cast - 0.3) < 4 * math.sqrt(0.21 / cast)
    flips = found * y[-2:]
    assert abs((flips[0] * flips[1]).double().mean() - 0.16 * (cast / 2 / N) ** 2) < 0.04, "each on its own"


@zero_rules
def test_random_bits_are_fair_and_ones_own(ternary: bool) -> None:
    y = signs(ternary=ternary)
    found = sent("random:2", y)
    assert found.abs().min() == 1, "an attacker votes everywhere"
    for other in (found[1], y[0], y[-2], sent("random:2", y, round=2)[0], torch.ones(N)):
        assert abs((found[0] * other).double().mean()) < 4 / N**0.5


@zero_rules
def test_clones_send_the_same_random_bits(ternary: bool) -> None:
    y = signs(ternary=ternary)
    found = sent("clones:3", y)
    assert (found == found[0]).all()
    assert found.abs().min() == 1
    for other in (y[0], sent("clones:3", y, round=2)[0], sent("random:3", y)[0], torch.ones(N)):
        assert abs((found[0] * other).double().mean()) < 4 / N**0.5


@zero_rules
@pytest.mark.parametrize("name", ["anti", "sleeper"])
def test_anti_is_minus_the_majority_of_the_honest(name: str, ternary: bool) -> None:
    y = signs(ternary=ternary)
    v = y[:4].sum(0)
    found = sent(f"{name}:3:1", y)
    assert (found == found[0]).all()
    assert torch.equal(found[0][v != 0], -v[v != 0].sign())
    ties = found[0][v == 0]
    assert abs(ties.double().mean()) < 4 / len(ties) ** 0.5, "a fair coin where there is no majority"


def test_anti_does_not_count_who_takes_no_part() -> None:
    y = signs(ternary=False)
    found = sent("anti:4", y, present=[True, False, False, True, True, True, True])
    assert torch.equal(found, -y[:1].expand(4, -1))


@zero_rules
def test_alie_is_the_mean_less_z_deviations(ternary: bool) -> None:
    """15 workers, 5 attack: z = Phi^-1((15 - 8) / 10)."""
    y = signs(ternary=ternary, m=15)
    honest = y[:10].double()
    z = NormalDist().inv_cdf(0.7)
    expected = (honest.mean(0) - z * honest.std(0, correction=0)).sign()
    found = sent("alie:5", y)
    assert (found == found[0]).all()
    decided = expected != 0
    assert torch.equal(found[0][decided], expected[decided].long())
    assert found[0].double().mean() < honest.mean() - 0.3


@pytest.mark.parametrize("count", [1, 8, 15])
def test_alie_has_a_z_for_any_number_of_attackers(count: int) -> None:
    assert sent(f"alie:{count}", signs(ternary=False, m=15)).abs().min() == 1


@zero_rules
def test_narrow_is_with_the_majority_unless_it_can_overturn_it(ternary: bool) -> None:
    y = signs(ternary=ternary, m=15)
    v = y[:10].sum(0)
    found = sent("narrow:5", y)
    assert (found == found[0]).all()
    clear = v.abs() > 5
    assert torch.equal(found[0][clear], v.sign()[clear])
    other = ~clear & (v != 0)
    assert torch.equal(found[0][other], -v.sign()[other])


@pytest.mark.parametrize("name", ["alie", "narrow"])
def test_attackers_may_add_noise_of_their_own(name: str) -> None:
    y = signs(ternary=False, m=15)
    plain, noisy = sent(f"{name}:5", y), sent(f"{name}=0.25:5", y)
    inverted = plain != noisy
    assert inverted.double().mean(1).tolist() == pytest.approx([0.25] * 5, abs=0.02)
    assert not torch.equal(inverted[0], inverted[1])


def test_an_impostor_agrees_until_it_is_believed() -> None:
    y = signs(ternary=False, m=15)
    v = y[:10].sum(0)
    agreeing = sent("impostor:5", y, round=40)
    assert torch.equal(agreeing[0][v != 0], v.sign()[v != 0])
    assert torch.equal(sent("impostor=0:5", y, round=41), sent("alie:5", y, round=41))
    changed = attack("impostor:5", 15).change(votes_of(y), seed=0, round=1, last=None)
    assert changed.batch_sizes[10:] == tuple(1000 * size for size in range(14, 19))


@pytest.mark.parametrize(("total", "seen"), [(1.0, -0.2), (1.8, -0.04), (2.0, 0.0), (3.0, 0.2), (9.0, 1.0)])
def test_attackers_that_split_push_by_a_sum_and_agree_by_little(total: float, seen: float) -> None:
    """Their agreement is (E S^2 - k) / (k^2 - k), S one of the two possible sums next to the wanted one."""
    y = signs(ternary=False, m=15)
    close = y[:10].sum(0).abs() <= 4
    together, found = sent("alie:5", y), sent(f"split={total}:5", y)
    assert torch.equal(found[:, ~close & (y[:10].sum(0) > 9)], together[:, ~close & (y[:10].sum(0) > 9)])
    pushed = (found * together)[:, close].double()
    assert pushed.sum(0).mean() == pytest.approx(min(total, 5), abs=0.05)
    agreement = (pushed @ pushed.T / pushed.shape[1]).fill_diagonal_(0).sum() / 20
    assert agreement == pytest.approx(seen, abs=0.02)
    assert pushed.mean(1).std() < 0.05, "all of them as often"


def test_a_feint_is_an_impostor_that_splits() -> None:
    y = signs(ternary=False, m=15)
    assert torch.equal(sent("feint:5", y, round=40), sent("impostor:5", y, round=40))
    assert torch.equal(sent("feint=1.5:5", y, round=41), sent("split=1.5:5", y, round=41))


@zero_rules
def test_mimic_copies_the_first_honest_worker(ternary: bool) -> None:
    y = signs(ternary=ternary)
    assert torch.equal(sent("mimic:3", y), y[:1].expand(3, -1))
    assert torch.equal(sent("mimic:3", y, present=[False] + [True] * 6), y[1:2].expand(3, -1))
    assert torch.equal(sent("mimic:7", y), y)


@zero_rules
def test_targeted_inverts_a_fixed_share_of_the_coordinates(ternary: bool) -> None:
    y = signs(ternary=ternary)
    y[-2:] += (y[-2:] == 0).long()
    for text, share in (("targeted:2", 0.1), ("targeted=0.4:2", 0.4)):
        where = sent(text, y) == -y[-2:]
        assert torch.equal(where[0], where[1])
        assert torch.equal(where, sent(text, y, round=9) == -y[-2:])
        assert abs(where[0].double().mean() - share) < 4 * math.sqrt(share * (1 - share) / N)


def test_an_oscillator_is_hostile_in_one_round_of_ten() -> None:
    y = signs(ternary=False)
    hostile = [t for t in range(1, 31) if not torch.equal(sent("oscillator:2", y, round=t), y[-2:])]
    assert hostile == [10, 20, 30]
    assert torch.equal(sent("oscillator:2", y, round=10), sent("anti:2", y, round=10))


@zero_rules
def test_echo_resends_the_last_decision(ternary: bool) -> None:
    y = signs(ternary=ternary)
    decision = signs(ternary=ternary, m=1)[0]
    planes = pack_signs(decision.float(), None)[0]
    assert torch.equal(sent("echo:2", y), y[-2:]), "in the first round there is none"
    assert torch.equal(sent("echo:2", y, last=planes), decision.expand(2, -1))
    plain = signs(ternary=False)
    assert torch.equal(sent("echo:2", plain, last=planes), decision.expand(2, -1))


@zero_rules
def test_a_push_contradicts_decisions_as_often_as_it_is_strong(ternary: bool) -> None:
    y = signs(ternary=ternary)
    decision = signs(ternary=ternary, m=1)[0]
    planes = pack_signs(decision.float(), None)[0]
    assert torch.equal(sent("push:2", y), y[-2:]), "in the first round there is nothing to push against"
    assert torch.equal(sent("push=32:2", y, last=planes), -decision.expand(2, -1))
    for strength, rounds in ((0, 100), (1.6, 105), (16, 150)):
        pushed = [sent(f"push={strength}:2", y, round=t, last=planes)[0] for t in range(1, 201)]
        assert sum(torch.equal(each, -decision) for each in pushed) == rounds
        assert sum(torch.equal(each, decision) for each in pushed) == 200 - rounds


def test_a_liar_declares_more_and_votes_as_it_should() -> None:
    votes = votes_of(signs(ternary=False))
    changed = attack("lie=50:2").change(votes, seed=0, round=1, last=None)
    assert changed.batch_sizes == (4, 5, 6, 7, 8, 450, 500)
    assert changed.planes is votes.planes
    most = attack("lie=4294967296:1").change(votes, seed=0, round=1, last=None)
    assert most.batch_sizes[-1] == 2**32 - 1


def test_label_flip_is_about_the_batch() -> None:
    hostility = attack("label-flip:2:5")
    assert [m for m in range(M) if hostility.relabels(m, 5)] == [5, 6]
    assert not hostility.relabels(6, 4)
    assert not attack("invert:2").relabels(6, 5)
    y = signs(ternary=False)
    assert torch.equal(sent("label-flip:2", y), y[-2:])


def test_attacks_start_and_count() -> None:
    hostility = attack("invert:3:50", 15)
    assert hostility.first == 12, "the last, in modes 2 to 4 the strongest"
    votes = votes_of(signs(ternary=False))
    assert hostility.change(votes, seed=0, round=99, last=None) is votes, "none of them is here"
    hostility = attack("invert:3:50")
    assert hostility.change(votes, seed=0, round=49, last=None) is votes
    assert hostility.change(votes, seed=0, round=50, last=None) is not votes
    assert parse_attack(None, 15) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("invrt:3", "there is no attack 'invrt'; did you mean 'invert'"),
        ("qqq:3", r"there is no attack 'qqq'\. All: invert"),
        ("invert", r"wanted NAME\[=STRENGTH\]:COUNT\[:START\]"),
        ("invert:x", "wanted NAME"),
        ("invert:16", r"COUNT in 0\.\.15"),
        ("flip=2:3", r"STRENGTH in \[0, 1\]"),
        ("flip=:3", "wanted NAME"),
        ("invert:1:2:3", "wanted NAME"),
        ("anti=0.3:1", "attack is 'anti=0.3:1'; anti has no strength"),
        ("sleeper:3", "a sleeper needs START, the round it wakes up in: sleeper:3:100"),
    ],
)
def test_attacks_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_attack(text, 15)


def test_stacking_votes_one_by_one() -> None:
    rows = [pack_signs(torch.tensor(x), None)[0] for x in ([1.0, 0.0, -1.0], [1.0, 1.0, 1.0])]
    found = stacked([rows[0], None, rows[1]._replace(support=None)], [3, 5, 8], 3, range(100, 110))
    assert unpack_signs(found.planes, 3).tolist() == [[1, 0, -1], [-1, -1, -1], [1, 1, 1]]
    assert found.present is not None
    assert found.present.tolist() == [True, False, True]
    assert (found.workers, found.batch_sizes) == ((3, 5, 8), (103, 105, 108))
    assert stacked([None], [0], 3, [1]).planes.support is None


# ---- runs ----------------------------------------------------------------------------------------


def small(name: str, **settings: Any) -> Config:
    start = ":4" if name == "sleeper" else ""
    usual: dict[str, Any] = {
        "task": "mnist-10k", "model": "mlp", "rule": "robust", "batch_sizes": (4, 8, 4, 8, 16),
        "rounds": 11, "evaluate_every": 11, "attack": f"{STRENGTHS.get(name, name)}:2{start}",
    }  # fmt: skip
    return Config(**(usual | settings))


def finished(config: Config, task: Task, **machine: Any) -> Run:
    run = Run(config, task, Machine(**machine))
    with run.machine.ready():
        while run.round < config.rounds:
            run.step()
    return run


@pytest.mark.parametrize("recipe", ["paper", "tuned"])
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_together_is_the_attack_one_by_one(digits: Task, name: str, recipe: str) -> None:
    """With workers away; and it changes something."""
    config = small(name, recipe=recipe, miss=0.15, rule="weighted" if name == "lie" else "robust")
    one, all_ = (finished(config, digits, together=way) for way in (False, True))
    assert isinstance(all_.workers, Together)
    differing = (
        one.gradients.x != all_.gradients.x
    )  # sums in another order: on some CPUs a sign near zero differs
    assert differing.float().mean() < 0.01
    results = [run.result("done") for run in (one, all_)]
    for same in ("bytes_up", "bytes_down"):
        assert results[0][same] == results[1][same], same
    weights = [torch.tensor(run.history["trust"]["weight"][-1]) for run in (one, all_)]
    torch.testing.assert_close(*weights, rtol=0.05, atol=0.05)
    honest = finished(small(name, recipe=recipe, miss=0.15, rule=config.rule, attack=None), digits)
    assert not torch.equal(one.gradients.x, honest.gradients.x)


def test_an_attack_without_voters(digits: Task) -> None:
    run = finished(small("anti", miss=1.0, rounds=2), digits)
    assert run.history["voters"] == [0, 0]


def test_a_run_with_echoes_goes_on_bit_for_bit(digits: Task, tmp_path: Path) -> None:
    config = small("echo")
    whole = train(config, digits, tmp_path / "whole")
    train(config, digits, tmp_path / "part", watch=lambda run: run.round == 5)
    rest = train(config, digits, tmp_path / "part", resume=True)
    assert rest["evaluations"] == whole["evaluations"]
    assert rest["trust"] == whole["trust"]


def test_wrong_labels_count_backwards(digits: Task) -> None:
    labels = torch.tensor([0, 3, 9])
    assert digits.train.wrong(labels).tolist() == [9, 6, 0]


def test_yardsticks_are_not_attacked(digits: Task) -> None:
    runs = [finished(small("label-flip", rule="oracle", attack=a), digits) for a in ("label-flip:2", None)]
    assert torch.equal(runs[0].gradients.x, runs[1].gradients.x)


def test_the_command_that_explains_the_rules(capsys: pytest.CaptureFixture[str]) -> None:
    from signvote import RULES
    from signvote.cli.tools import Rules

    Rules().run()
    lines = capsys.readouterr().out.splitlines()
    assert lines[::3] == list(RULES)
    assert all(line.startswith("  ") for i, line in enumerate(lines) if i % 3)


def test_three_alie_attackers_of_15_are_never_overruled_by_a_majority() -> None:
    """Every count of honest plus votes: their vote is the decision, so no weight on them changes it."""
    y = torch.ones(15, N, dtype=torch.long)
    for plus in range(13):
        y[plus:12, plus::13] = -1  # columns plus, plus + 13, ...: `plus` of 12 honest workers say +1
    found = sent("alie:3", y)
    assert set(y[:12].sum(0).tolist()) == set(range(-12, 13, 2))
    assert torch.equal((y[:12].sum(0) + found.sum(0)).sign(), found[0])
