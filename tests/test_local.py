"""Local steps in the simulator: laws, yardsticks, settings, states."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signvote import ConfigError
from signvote.core.scaled import ScaledVotes
from signvote.sim import Config
from signvote.sim.local import Locally
from signvote.sim.run import Run
from signvote.sim.sparseloco import CHUNK, FEEDBACK, KEPT, compressed, message_bytes
from tests.local import H, flat, inner, settings
from tests.ranks import Batches, config, fresh, task

each_rule = pytest.mark.parametrize("rule", ["weighted", "diloco", "sparseloco"])


def run_of(rule: str, rounds: int = 0, **more: Any) -> Run:
    run = Run(settings(rule, 3, **more), task())
    for _ in range(rounds):
        run.step()
    return run


def workers_of(run: Run) -> Locally:
    assert isinstance(run.workers, Locally)
    return run.workers


def rule_of(run: Run) -> ScaledVotes:
    assert run.server is not None
    assert isinstance(run.server.rule, ScaledVotes)
    return run.server.rule


# ---- what is computed ----------------------------------------------------------------------------


def by_hand(run: Run, rank: int, t: int, optimizers: dict[int, Any]) -> Tensor:
    """The change of a worker in round t, the obvious way: a model of its own."""
    model = fresh(run.config)
    parameters = list(model.parameters())
    with torch.no_grad():
        for p, q in zip(parameters, run.model.parameters(), strict=True):
            p.copy_(q)
    before = flat(model)
    kept = run.workers.memories()[rank].residual
    if kept is not None:  # local steps start from the worker's own parameters
        before = before - kept
        nn.utils.vector_to_parameters(before.clone(), parameters)
    optimizer = inner(model, run.config)
    if rank in optimizers:
        optimizer.load_state_dict(optimizers[rank])
    batches = Batches(rank, run.config)
    for number in range((t - 1) * H + 1, t * H + 1):
        for group in optimizer.param_groups:
            group["lr"] = run.config.local_step_at(number)
        optimizer.zero_grad()
        batches.loss(model, number).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    optimizers[rank] = optimizer.state_dict()
    return before - flat(model)


def test_diloco_is_the_outer_step_on_the_mean_change() -> None:
    run = run_of("diloco", outer_step=0.7, outer_momentum=0.6)
    sizes = torch.tensor(run.config.batch_sizes)
    momentum = torch.zeros(run.layout.size)
    optimizers: dict[int, Any] = {}
    for t in (1, 2, 3):
        changes = torch.stack([by_hand(run, rank, t, optimizers) for rank in range(3)])
        mean = (changes * (sizes / sizes.sum())[:, None]).sum(0)
        momentum = 0.6 * momentum + mean
        wanted = run.gradients.x - 0.7 * (mean + 0.6 * momentum)
        run.step()
        torch.testing.assert_close(run.gradients.x, wanted, atol=1e-6, rtol=1e-5)


def test_votes_carry_the_mean_change_over_rounds() -> None:
    """Without momentum: what was applied, and what both sides kept, is the mean of the changes."""
    run = run_of("majority", outer_step=1.0, outer_momentum=0.0)
    begin = run.gradients.x.clone()
    optimizers: dict[int, Any] = {}
    mean = torch.zeros(run.layout.size)
    for t in range(1, 6):
        changes = [by_hand(run, rank, t, optimizers) for rank in range(3)]
        mean += torch.stack(changes).mean(0)
        run.step()
    residuals = [memory.residual for memory in run.workers.memories()]
    kept = sum(residual for residual in residuals if residual is not None) / 3
    found = begin - run.gradients.x + rule_of(run).residual.values + kept
    torch.testing.assert_close(found, mean, atol=1e-5, rtol=0)


def test_clipping_and_factors_of_steps_apply_to_local_steps() -> None:
    usual = run_of("diloco", 1)
    clipped = run_of("diloco", 1, clip=1e-3, inner="sgd")
    still = run_of("diloco", 1, steps={"0.*": 0.0}, decays="matrices")
    assert not torch.equal(usual.gradients.x, clipped.gradients.x)
    start = Run(usual.config, task()).gradients.x
    first = still.layout.segments[0]
    moved = still.gradients.x != start
    assert not moved[first.start : first.stop].any()
    assert moved[first.stop :].any()


def test_one_local_step_follows_the_schedule_of_all_of_them() -> None:
    plain = settings("weighted", 3)
    assert plain.local_step_at(plain.rounds * H) == plain.step_at(plain.rounds * H) or plain.schedule
    steps = [plain.local_step_at(number) for number in range(1, plain.rounds * H + 1)]
    assert max(steps) <= plain.step
    assert steps[-1] == min(steps)


# ---- bytes ---------------------------------------------------------------------------------------


def test_bytes_down_grow_with_peers_only_where_changes_are_gathered() -> None:
    n = run_of("weighted").layout.size
    tensors = len(run_of("weighted").layout.segments)
    for world in (2, 4):
        runs = {rule: Run(settings(rule, world), task()) for rule in ("majority", "diloco", "sparseloco")}
        for run in runs.values():
            run.step()
        down = {rule: run.history["bytes_down"][0] / world for rule, run in runs.items()}
        up = {rule: run.history["bytes_up"][0] / world for rule, run in runs.items()}
        assert up["majority"] == 64 + -(-n // 8) + tensors
        assert down["majority"] == up["majority"] + tensors + 8 * world
        assert up["diloco"] == down["diloco"] == 4 * n
        assert up["sparseloco"] == message_bytes(n)
        assert down["sparseloco"] == (world - 1) * message_bytes(n)


@pytest.mark.parametrize("n", [1, 63, CHUNK, CHUNK + 1, 3 * CHUNK - 5])
def test_sparse_changes_and_their_residual_are_the_signal(n: int) -> None:
    change, residual = torch.randn(2, n, generator=torch.Generator().manual_seed(n))
    sent, left = compressed(change, residual)
    torch.testing.assert_close(sent + left, change + FEEDBACK * residual)
    chunks = [sent[start : start + CHUNK] for start in range(0, n, CHUNK)]
    for chunk in chunks:
        assert int((chunk != 0).sum()) == -(-KEPT * len(chunk) // CHUNK)
        assert len(set(chunk.abs().tolist())) <= 3  # two levels and zero
    assert message_bytes(n) >= 14 / 8 * int((sent != 0).sum())


# ---- who takes part ------------------------------------------------------------------------------


def test_absent_workers_keep_what_they_have_and_continue() -> None:
    run = run_of("weighted", 1, absent=("1:2:3",))
    optimizers = copy.deepcopy(workers_of(run).optimizers[1].state_dict())
    residual = run.workers.memories()[1].residual
    run.step()
    run.step()
    assert residual is not None
    assert torch.equal(residual, run.workers.memories()[1].residual)  # type: ignore[arg-type]
    same = workers_of(run).optimizers[1].state_dict()["state"]
    assert torch.equal(same[0]["exp_avg"], optimizers["state"][0]["exp_avg"])
    run.step()
    assert run.history["voters"] == [3, 2, 2, 3]
    assert not torch.equal(residual, run.workers.memories()[1].residual)  # type: ignore[arg-type]


@each_rule
def test_too_few_voters_move_nothing(rule: str) -> None:
    run = run_of(rule, 1, min_voters=3, absent=("1:2:2",))
    before = run.gradients.x.clone()
    kept = [memory.residual for memory in run.workers.memories()]
    run.step()
    assert torch.equal(run.gradients.x, before)
    if rule == "weighted":
        assert not torch.equal(kept[0], run.workers.memories()[0].residual)  # type: ignore[arg-type]
    run.step()
    assert not torch.equal(run.gradients.x, before)


def test_a_worker_whose_change_is_not_finite_abstains_and_starts_its_optimizer_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = run_of("weighted", 1)
    usual = run.gradients.of
    poisoned = [True]

    def of(*args: Any) -> Tensor:
        gradient = usual(*args)
        return gradient.fill_(torch.nan) if poisoned[0] and args[1][-1] == 2 else gradient

    monkeypatch.setattr(run.gradients, "of", of)
    run.step()
    assert run.server is not None
    assert run.server.report.abstained == {2: "non-finite gradient"}
    assert run.gradients.x.isfinite().all()
    poisoned[0] = False
    run.step()
    assert run.server.report.voters == (0, 1, 2)


@each_rule
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_run_resumes_bit_for_bit(rule: str, optimizer: str) -> None:
    run = run_of(rule, 2, inner=optimizer)
    resumed = run_of(rule, inner=optimizer)
    resumed.load_state_dict(copy.deepcopy(run.state_dict()))
    for each in (run, resumed):
        each.step()
        each.step()
    assert torch.equal(run.gradients.x, resumed.gradients.x)
    assert run.history == resumed.history


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"local_steps": 0}, "local_steps is 0; it must be 1 or more"),
        ({"rule": "it-signsgd"}, "does not go with local steps; use one of majority"),
        ({"zeros": "abstain"}, "votes after local steps need 'coin'"),
        ({"polar": True}, "use no feedback, top, interpolation or polar"),
        ({"feedback": True}, "use no feedback, top, interpolation or polar"),
        ({"inner": "adam"}, "inner is adam; it must be adamw or sgd"),
        ({"beta2": 1.0}, r"beta2 is 1.0; it must be in \[0, 1\)"),
        ({"outer_step": 0.0}, "outer_step is 0.0; it must be above 0"),
        ({"outer_momentum": 1.0}, r"outer_momentum is 1.0; it must be in \[0, 1\)"),
        ({"rule": "diloco", "local_steps": None}, "rule is 'diloco', which needs local steps"),
    ],
)
def test_settings_that_do_not_fit(more: dict[str, Any], message: str) -> None:
    usual = {"rule": "weighted", "local_steps": 2}
    chosen = {**usual, **more}
    with pytest.raises(ConfigError, match=message):
        config(chosen.pop("rule"), 2, 3, **chosen)


def test_the_recipe_gives_the_step_of_the_inner_optimizer() -> None:
    one = config("weighted", 2, 3)
    assert one.local_steps is None
    assert Config(task="points", batch_sizes=(4, 4), local_steps=5).step == 8e-3
    assert Config(task="points", batch_sizes=(4, 4), local_steps=5, inner="sgd").step == 1.0
