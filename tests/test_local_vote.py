"""`LocalVote` in a world of one, and what it refuses."""

from __future__ import annotations

import copy
import pickle
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signvote import ConfigError, LocalVote, ScaledVotes, StateError
from signvote.core.layout import Layout
from signvote.core.rules import make_rule
from tests.local import H, LocalScript, flat, settings
from tests.ranks import checksum, simulated
from tests.test_package import ROOT


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_without_torch_distributed_it_is_the_simulator_with_one_worker() -> None:
    case = settings("weighted", 1)
    assert LocalScript(0, case).train(4) == simulated(case)[:4]


def residual_of(script: LocalScript) -> Tensor:
    kept = script.optimizer.poll.sender.memory.residual
    assert kept is not None
    return kept


def test_nothing_is_lost_alone() -> None:
    """What was applied, and the residuals of both sides, are all that the optimizer did."""
    script = LocalScript(0, settings("majority", 1), step=1.0, momentum=0.0)
    start = flat(script.model)
    changed = torch.zeros_like(start)
    for _ in range(4):
        before = flat(script.model) - residual_of(script)
        for _ in range(H - 1):
            script.step()
        reached: list[Tensor] = []
        script.optimizer.every += 1  # one more step, then vote by hand
        script.step()
        script.optimizer.every -= 1
        reached.append(flat(script.model))
        changed += before - reached[0]
        script.optimizer.vote()
    rule = script.optimizer.poll.server.rule
    assert isinstance(rule, ScaledVotes)
    applied = start - flat(script.model)
    torch.testing.assert_close(
        applied + residual_of(script) + rule.residual.values, changed, atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("steps", [2 * H, 2 * H + 1])
def test_a_run_resumes_bit_for_bit_also_between_votes(steps: int) -> None:
    case = settings("weighted", 1)
    script = LocalScript(0, case)
    for _ in range(steps):
        script.step()
    saved = copy.deepcopy((script.model.state_dict(), script.optimizer.state_dict()))
    resumed = LocalScript(0, case)
    resumed.model.load_state_dict(saved[0])
    resumed.optimizer.load_state_dict(saved[1])
    resumed.number = steps
    assert resumed.train(2) == script.train(2)


def test_a_pass_in_training_starts_from_the_ranks_own_parameters() -> None:
    """After a vote the model has the voted parameters, until it trains: then it has them less the residual."""
    script = LocalScript(0, settings("weighted", 1))
    passed = partial(script.batches.loss, t=1)
    for _ in range(2):
        script.train(1)
        voted = flat(script.model)
        copied = pickle.loads(pickle.dumps(copy.deepcopy(script.model))).train()
        kept = residual_of(script).clone()
        assert kept.abs().max() > 0
        passed(copied)
        passed(script.model.eval())
        with torch.no_grad():
            passed(script.model.train())
        assert torch.equal(flat(script.model), voted)
        passed(script.model)
        assert torch.equal(flat(script.model), voted - kept)


def test_a_closure_starts_from_the_ranks_own_parameters() -> None:
    """The module is not called: parameters are used by themselves, as a script may."""
    weight = nn.Parameter(torch.tensor([1.0, -1.0, 3.0]))
    optimizer = LocalVote(torch.optim.SGD([weight], lr=0.1), every=1, step=1.0, momentum=0.0)
    seen: list[Tensor] = []

    def closure() -> float:
        seen.append(weight.detach().clone())
        weight.grad = weight.detach().clone()
        return 0.0

    optimizer.step(closure)
    voted = weight.detach().clone()
    kept = optimizer.poll.sender.memory.residual
    assert kept is not None
    kept = kept.clone()
    optimizer.step(closure)
    assert torch.equal(seen[1], voted - kept)


def test_a_model_may_be_changed_after_a_vote() -> None:
    script = LocalScript(0, settings("weighted", 1))
    script.train(1)
    with torch.no_grad():
        for p in script.model.parameters():
            p.zero_()
    kept = residual_of(script).clone()
    script.train(1)
    assert (flat(script.model) + kept).abs().max() < 0.1


def test_too_few_voters_return_to_the_last_vote() -> None:
    script = LocalScript(0, settings("weighted", 1), min_voters=2)
    before = checksum(script.model)
    assert script.round() == before
    assert not script.optimizer.report.is_decided
    assert residual_of(script).abs().max() > 0


def test_a_change_that_is_not_finite_abstains() -> None:
    script = LocalScript(0, settings("weighted", 1))
    script.train(1)
    before = checksum(script.model)
    script.step()
    with torch.no_grad():
        next(script.model.parameters()).fill_(torch.nan)
    script.optimizer.vote()
    assert checksum(script.model) == before
    assert script.optimizer.report.abstained == {0: "non-finite gradient"}
    assert not script.inner.state
    assert script.round() != before


def test_samples_between_votes_are_declared() -> None:
    case = settings("weighted", 1)
    counted = LocalScript(0, case)
    counted.train(1)
    assert counted.optimizer.batch_sizes == (H * case.batch_sizes[0],)
    given = LocalScript(0, case, batch_size=5)
    given.train(1)
    assert given.optimizer.batch_sizes == (5,)


def test_it_has_the_surface_of_an_optimizer() -> None:
    model = nn.Linear(2, 1)
    inner = sgd(model)
    optimizer = LocalVote(inner, every=1, rule=ScaledVotes(make_rule("majority", named_layout(model))))
    scheduler = torch.optim.lr_scheduler.ConstantLR(inner)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        return float(loss.detach())

    assert isinstance(optimizer.step(closure), float)
    scheduler.step()
    assert optimizer.param_groups is inner.param_groups
    assert "LocalVote(every 1 steps of SGD" in repr(optimizer)
    assert optimizer.round == 1


def named_layout(model: nn.Module) -> Layout:
    return Layout((str(i), p) for i, p in enumerate(model.parameters()))


def test_a_rule_may_be_an_object() -> None:
    model = nn.Linear(2, 1)
    optimizer = LocalVote(sgd(model), rule=make_rule("majority", named_layout(model)))
    assert isinstance(optimizer.poll.server.rule, ScaledVotes)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"every": 0}, "every is 0; it must be 1 or more"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"step": 0.0}, "outer step is 0"),
        ({"momentum": 1.5}, "outer momentum is 1.5"),
        ({"check_every": -1}, "check_every is -1"),
    ],
)
def test_settings_out_of_range_are_refused_at_once(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalVote(sgd(nn.Linear(2, 1)), **how)


def test_rules_and_types_that_do_not_fit_are_refused() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match="need a rule with a weight for each worker"):
        LocalVote(sgd(model), rule="mean").poll  # noqa: B018
    with pytest.raises(ConfigError, match="LocalVote needs all in float32"):
        LocalVote(sgd(model.bfloat16())).poll  # noqa: B018


def test_the_script_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "local-steps.md").read_text()
    (script,) = [part for part in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "import os" in part]
    exec(script, {"__name__": "__main__"})
    assert capsys.readouterr().out.startswith("8 votes, loss 0")


def test_the_state_of_something_else_is_refused() -> None:
    script = LocalScript(0, settings("weighted", 1))
    with pytest.raises(StateError, match="kind"):
        script.optimizer.load_state_dict({"kind": "vote", "version": 1})
