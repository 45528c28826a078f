"""The simulator: exact gradients, the real core, runs that repeat, stop and go on bit for bit."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from signvote import ConfigError, StateError, checkpoint
from signvote.core.bits import unpack_signs
from signvote.kernels import Planes
from signvote.sim import Config, Run, train
from signvote.sim.compare import compare, done, name_of
from signvote.sim.gradients import Gradients, evaluate
from signvote.tasks import Data, Task, load_task
from tests.launcher import launched
from tests.textbook import Textbook


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def small(rule: str = "weighted", **changes: Any) -> Config:
    values: dict[str, Any] = {
        "task": "mnist-10k",
        "model": "mlp",
        "batch_sizes": (4, 4, 8, 32),
        "rounds": 12,
        "evaluate_every": 5,
    }
    return Config(rule=rule, **values | changes)


def points(model: Any, n: int = 200, **rest: Any) -> Task:
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(1))
    data = Data(inputs=x, labels=(x[:, 0] > 0).long() + (x[:, 1] > 0).long())
    return Task(name="points", train=data, test=data, model=model, **rest)


def finished(config: Config, task: Task) -> Run:
    run = Run(config, task)
    while run.round < config.rounds:
        run.step()
    return run


def same_parameters(a: Run, b: Run) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True))


# ---- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "mnist-cnn"])
def test_gradients_equal_the_separate_computation(name: str) -> None:
    """Batches of up to a chunk bit for bit; larger ones up to rounding, and signs only flip there."""
    task = load_task("mnist-10k", model=name)
    model = task.model()
    gradients = Gradients(task, model)
    for size in (1, 4, 64, 200):
        indices = torch.randperm(len(task.train))[:size]
        flat = gradients.of(indices, (0,)).clone()
        copy = task.model()
        copy.load_state_dict(model.state_dict())
        task.loss(copy, task.batch(task.train, indices)).backward()  # type: ignore[no-untyped-call]
        separate = torch.cat([p.grad.flatten() for p in copy.parameters() if p.grad is not None])
        if size <= 64:
            assert torch.equal(flat, separate)
        else:
            differing = torch.sign(flat) != torch.sign(separate)
            assert differing.double().mean() < 1e-3
            assert separate[differing].abs().max() < 1e-6 * separate.abs().max() if differing.any() else True


def test_batch_norm_sees_each_workers_batch_whole() -> None:
    task = points(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3))
    )
    gradients = Gradients(task, task.model())
    batch = torch.arange(50)
    flat = gradients.of(batch, (0,)).clone()
    gradients.model.zero_grad(set_to_none=False)
    task.loss(gradients.model, task.batch(task.train, batch)).backward()  # type: ignore[no-untyped-call]
    assert torch.equal(flat, gradients.flat)


class Reader(nn.Module):
    """Embedding, layer norm, dropout, tied weights: nothing that needs a special path."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.drop = nn.Embedding(20, 16), nn.LayerNorm(16), nn.Dropout(0.3)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.drop(self.norm(self.embed(tokens).mean(1))))
        return out


def test_models_with_dropout_embedding_and_layer_norm_repeat() -> None:
    tokens = torch.randint(0, 20, (100, 5))
    data = Data(inputs=tokens, labels=tokens[:, 0])
    task = Task(name="tokens", train=data, test=data, model=Reader)
    config = small(batch_sizes=(4, 8), rounds=20, task="tokens", step=0.01)
    a, b = finished(config, task), finished(config, task)
    assert same_parameters(a, b)
    assert a.history["evaluations"]["loss"][-1] < a.history["evaluations"]["loss"][0]


# ---- rounds --------------------------------------------------------------------------------------


def test_the_textbook_agrees_on_every_decision(digits: Task) -> None:
    """150 rounds of the paper's recipe: 100 of warm-up and 50 weighted."""
    config = small(
        "it-signsgd", recipe="paper", batch_sizes=(4, 4, 4, 16, 64), rounds=150, evaluate_every=999
    )
    run, book = Run(config, digits), Textbook(config, digits)
    decisions: list[Planes] = []
    apply = run._apply
    run._apply = lambda t, planes: (decisions.append(planes), apply(t, planes))  # type: ignore[method-assign, assignment, func-returns-value]
    for _ in range(150):
        run.step()
        ours = unpack_signs(decisions[-1], run.layout.size)
        assert torch.equal(ours, book.round().to(torch.int8)), run.round
    for model in book.models:
        assert all(torch.equal(p, q) for p, q in zip(run.model.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("rule", ["majority", "it-signsgd", "weighted", "robust", "oracle", "sgd"])
@pytest.mark.parametrize("recipe", ["paper", "tuned"])
def test_every_rule_and_recipe_learns(digits: Task, rule: str, recipe: str) -> None:
    run = finished(small(rule, recipe=recipe, rounds=60, evaluate_every=60), digits)
    evaluations = run.history["evaluations"]
    assert evaluations["round"] == [0, 60]
    assert evaluations["accuracy"][-1] > 0.7
    result = json.loads(json.dumps(run.result("done")))
    assert result["config"]["rule"] == rule
    assert Config.from_dict(result["config"]) == run.config
    if rule in ("oracle", "sgd"):
        assert result["trust"] == {}
    else:
        assert len(result["trust"]["weight"][-1]) == 4


def test_bytes_are_those_of_the_buffers_sent(digits: Task) -> None:
    strict = finished(small(rounds=3, recipe="tuned"), digits)
    n = strict.layout.size
    assert strict.history["bytes_up"] == strict.history["bytes_down"] == [4 * (64 + -(-n // 8))] * 3
    floats = finished(small("sgd", rounds=3), digits)
    assert floats.history["bytes_up"] == [4 * 4 * n] * 3
    assert 31 < floats.history["bytes_up"][0] / strict.history["bytes_up"][0] < 32
    zeros = finished(small(rounds=3, recipe="paper"), digits)
    assert zeros.history["bytes_up"][0] > 1.5 * strict.history["bytes_up"][0], (
        "a support plane when it is needed"
    )


def test_absent_workers_cost_their_votes_only(digits: Task) -> None:
    run = finished(small(miss=0.3, absent=("0:1:6", "3:4"), rounds=12), digits)
    ballot = 64 + -(-run.layout.size // 8)
    voters = [size // ballot for size in run.history["bytes_up"]]
    assert voters == run.history["voters"]
    assert min(voters) >= 0
    assert max(voters) <= 3
    assert run.history["trust"]["overruled"][0][0] is None


def test_an_attack_is_seen_in_the_trust(digits: Task) -> None:
    run = finished(small(attack="invert:1", batch_sizes=(16,) * 5, rounds=20), digits)
    weights = run.history["trust"]["weight"][-1]
    assert weights[-1] == 0 < min(weights[:-1])


def test_sign_error_falls_with_better_workers(digits: Task) -> None:
    errors = [
        finished(
            small("majority", batch_sizes=sizes, rounds=10, sign_error=True, evaluate_every=10), digits
        ).history["sign_error"]["error"][-1]
        for sizes in ((2,) * 3, (256,) * 3)
    ]
    assert 0 < errors[1] < errors[0] < 0.6


# ---- repeating, stopping, going on ---------------------------------------------------------------


@pytest.mark.parametrize("rule", ["it-signsgd", "weighted", "robust", "sgd"])
def test_a_seed_decides_everything_whatever_the_threads(digits: Task, tmp_path: Path, rule: str) -> None:
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(train(small(rule, attack="flip:1"), digits, tmp_path / str(threads)))
        assert torch.get_num_threads() == threads
    states = [checkpoint.load(tmp_path / t / "checkpoint.safetensors") for t in ("1", "2")]
    assert all(torch.equal(p, states[1]["model"][name]) for name, p in states[0]["model"].items())
    assert results[0]["evaluations"] == results[1]["evaluations"]
    assert (
        train(small(rule, attack="flip:1", seed=1), digits, tmp_path / "x")["evaluations"]
        != results[0]["evaluations"]
    )


@pytest.mark.parametrize("rule", ["it-signsgd", "weighted", "robust", "oracle", "sgd"])
@pytest.mark.parametrize("recipe", ["paper", "tuned"])
def test_a_resumed_run_goes_on_bit_for_bit(digits: Task, tmp_path: Path, rule: str, recipe: str) -> None:
    config = small(rule, recipe=recipe, miss=0.2)
    whole = train(config, digits, tmp_path / "whole")
    part = train(config, digits, tmp_path / "part", watch=lambda run: run.round == 7)
    assert (part["status"], part["rounds_done"]) == ("interrupted", 7)
    rest = train(config, digits, tmp_path / "part", resume=True)
    assert (rest["status"], rest["rounds_done"]) == ("done", 12)
    for name in ("evaluations", "trust", "bytes_up", "bytes_down"):
        assert rest[name] == whole[name], name
    files = [checkpoint.load(tmp_path / d / "checkpoint.safetensors")["model"] for d in ("whole", "part")]
    assert all(torch.equal(p, files[1][name]) for name, p in files[0].items())


def test_a_checkpoint_of_another_run_is_refused(digits: Task, tmp_path: Path) -> None:
    train(small(rounds=2), digits, tmp_path)
    with pytest.raises(StateError, match="the checkpoint is of another run: rounds 2 instead of 3"):
        train(small(rounds=3), digits, tmp_path, resume=True)
    with pytest.raises(StateError, match="state has kind 'server'; wanted 'run'"):
        Run(small(), digits).load_state_dict({"kind": "server"})


@pytest.mark.parametrize("rule", ["it-signsgd", "weighted", "sgd"])
def test_a_longer_run_of_a_constant_schedule_is_the_one_that_was_long_at_once(
    digits: Task, tmp_path: Path, rule: str
) -> None:
    long = small(rule, recipe="paper", miss=0.2, rounds=12)
    short = replace(long, rounds=5, evaluate_every=2)
    train(long, digits, tmp_path / "long")
    train(short, digits, tmp_path / "grown")
    grown = train(long, digits, tmp_path / "grown", resume=True)
    assert (grown["status"], grown["rounds_done"]) == ("done", 12)
    files = [checkpoint.load(tmp_path / d / "checkpoint.safetensors")["model"] for d in ("long", "grown")]
    assert all(torch.equal(p, files[1][name]) for name, p in files[0].items())
    assert done(replace(long, rounds=13), tmp_path / "grown") is None, "signvote compare resumes it, too"
    with pytest.raises(ConfigError, match="holds another run: rounds is 12 there and 11 here"):
        done(replace(long, rounds=11), tmp_path / "grown")


@pytest.mark.parametrize("change", [{"schedule": "cosine"}, {"ramp": 0.1}, {"top_end": 0.1}, {"seed": 1}])
def test_a_run_whose_rounds_depend_on_their_number_does_not_grow(change: dict[str, Any]) -> None:
    short = small(recipe="paper", rounds=5)
    assert replace(short, rounds=6).extends(short.as_dict())
    changed = replace(short, **change)
    other = short if "seed" in change else changed
    assert not replace(changed, rounds=6).extends(other.as_dict())


@pytest.mark.slow
def test_a_killed_process_loses_only_what_came_after_the_last_checkpoint(
    digits: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed right after a checkpoint was written mid-run; the rest is as if nothing had happened."""
    config = small(rounds=30)
    monkeypatch.setattr("signvote.sim.loop.SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    code = (
        "import os, signvote.sim.loop as r; r.SECONDS_BETWEEN_CHECKPOINTS = 0.0\n"
        "from pathlib import Path; from signvote.sim import Config, train; from signvote.tasks import load_task\n"
        f"config = Config.from_dict({config.as_dict()!r})\n"
        "die = lambda run: os.kill(os.getpid(), 9) if run.round == 20 else None\n"
        f"train(config, load_task('mnist-10k', model='mlp'), Path({str(tmp_path / 'killed')!r}), watch=die)\n"
    )
    killed = launched("-c", code, cwd=tmp_path)
    assert killed.returncode == -signal.SIGKILL
    assert checkpoint.load(tmp_path / "killed" / "checkpoint.safetensors")["round"] == 19
    rest = train(config, digits, tmp_path / "killed", resume=True)
    assert rest["evaluations"] == train(config, digits, tmp_path / "whole")["evaluations"]


def test_compare_runs_the_grid_and_skips_what_is_done(digits: Task, tmp_path: Path) -> None:
    configs = [small(rule, seed=seed, rounds=4) for rule in ("majority", "weighted") for seed in (0, 1)]
    news: list[tuple[int, int, float]] = []
    results = compare(configs, tmp_path, command="test", jobs=2, watch=lambda *n: news.append(n))
    assert [r["config"]["rule"] for r in results["runs"]] == ["majority", "majority", "weighted", "weighted"]
    assert {n[0] for n in news} == {0, 1, 2, 3}
    alone = train(configs[2], digits, tmp_path / "alone")
    assert results["runs"][2]["evaluations"] == alone["evaluations"], "a process of its own changes nothing"
    made = {f: os.path.getmtime(f) for f in tmp_path.rglob("result.json")}
    again = compare(configs, tmp_path, command="test", jobs=2)
    assert again["runs"] == results["runs"]
    assert {f: os.path.getmtime(f) for f in tmp_path.rglob("result.json")} == made
    with pytest.raises(ConfigError, match="holds another run: rounds is 4 there and 5 here"):
        compare([small("majority", rounds=5)], tmp_path)
    assert len({name_of(c) for c in configs}) == 4


def test_evaluation_counts_every_test_sample(digits: Task) -> None:
    model = digits.model()
    assert evaluate(digits, model, 64)["accuracy"] == pytest.approx(evaluate(digits, model, 7)["accuracy"])
