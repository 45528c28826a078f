"""A task is whatever PyTorch trains: other inputs, labels, losses and metrics, from the simulator to the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from signvote import ConfigError
from signvote.cli.commands import parse
from signvote.report import figure, write
from signvote.results import read, results_file, results_of
from signvote.sim import Config, Run, train
from signvote.sim.compare import compare
from signvote.sim.gradients import Gradients
from signvote.sim.machine import Machine
from signvote.sim.population import split
from signvote.sim.setup import _log_fallback
from signvote.sim.workers import OneByOne
from signvote.tasks import (
    Batch,
    Data,
    Items,
    Measure,
    OutputLoss,
    Samples,
    Task,
    cross_entropy,
    load_task,
    loss,
    mae,
    perplexity,
    rmse,
    squared_error,
    token_cross_entropy,
)

N = 60


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X = random(N, 3)
Y = X @ torch.tensor([[1.0], [-2.0], [0.5]])


def config(rule: str = "weighted", **settings: Any) -> Config:
    usual: dict[str, Any] = {
        "task": "own",
        "batch_sizes": (4, 8, 16),
        "rounds": 6,
        "evaluate_every": 3,
        "step": 0.05,
    }
    return Config(rule=rule, **usual | settings)


def regression(**changes: Any) -> Task:
    data = Data(inputs=X, labels=Y)
    usual: dict[str, Any] = {
        "model": lambda: nn.Linear(3, 1),
        "loss": squared_error,
        "metrics": (rmse("m"), loss()),
    }
    return Task(name="own", train=data, test=data, **usual | changes)


class Pair(nn.Module):
    """Takes a tuple or a dict of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 1)
        self.b = nn.Embedding(5, 1)

    def forward(self, inputs: Any) -> Tensor:
        one, two = inputs.values() if isinstance(inputs, dict) else inputs
        out: Tensor = self.a(one) + self.b(two)
        return out


class Rows(Dataset[Any]):
    """A map-style data set."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


PLACES = torch.arange(N) % 5


def reconstruction(model: nn.Module, batch: Batch) -> Tensor:
    error: Tensor = (model(batch.inputs) - batch.inputs).square().mean()
    return error


def of_dict(model: nn.Module, batch: Batch) -> Tensor:
    error: Tensor = (model(batch.inputs["x"]) - batch.inputs["y"]).abs().mean()
    return error


def tasks() -> dict[str, Task]:
    def task(data: Any, **settings: Any) -> Task:
        return Task(name="own", train=data, test=data, **settings)

    regress: dict[str, Any] = {"loss": squared_error, "metrics": (mae("m"),)}
    dicts = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]
    tokens = torch.arange(N * 4).reshape(N, 4) % 7
    pixels = Data(inputs=random(N, 2, 4, 4), labels=torch.arange(N * 16).reshape(N, 4, 4) % 3)
    return {
        "regression": regression(),
        "tuple": task(Data(inputs=(X, PLACES), labels=Y), model=Pair, **regress),
        "dict": task(Data(inputs={"x": X, "place": PLACES}, labels=Y), model=Pair, **regress),
        "no labels": task(Data(inputs=X), model=lambda: nn.Linear(3, 3), loss=reconstruction),
        "data set": task(TensorDataset(X, Y), model=lambda: nn.Linear(3, 1), **regress),
        "data set of dicts": task(Rows(dicts), model=lambda: nn.Linear(3, 1), loss=of_dict),
        "data set of tensors": task(Rows(list(X)), model=lambda: nn.Linear(3, 3), loss=reconstruction),
        "tokens": task(
            Data(inputs=tokens, labels=tokens.roll(1, 1)),
            model=lambda: nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 7)),
            loss=token_cross_entropy,
            metrics=(loss("nats"), perplexity()),
        ),
        "pixels": task(pixels, model=lambda: nn.Conv2d(2, 3, 1)),
        "labels as dict": task(
            Data(inputs=X, labels={"y": Y}),
            model=lambda: nn.Linear(3, 1),
            loss=OutputLoss(lambda outputs, labels: (outputs - labels["y"]).abs().mean(1)),
        ),
    }


@pytest.mark.parametrize("kind", tasks())
def test_any_task_trains_and_repeats_and_resumes_bit_for_bit(kind: str, tmp_path: Path) -> None:
    task = tasks()[kind]
    whole = train(config(), task, tmp_path / "whole")
    train(config(), task, tmp_path / "cut", watch=lambda run: run.round == 2)
    cut = train(config(), tasks()[kind], tmp_path / "cut", resume=True)
    assert cut["evaluations"] == whole["evaluations"]
    first = task.metrics[0].name
    values = whole["evaluations"][first]
    assert whole["metrics"] == [metric.as_dict() for metric in task.metrics]
    assert values[-1] != values[0]
    assert kind == "pixels" or values[-1] < values[0]
    assert read(tmp_path / "whole" / "result.json")["runs"][0]["evaluations"] == whole["evaluations"]


@pytest.mark.parametrize("kind", ["tuple", "data set", "no labels", "regression"])
def test_a_gradient_is_that_of_the_loss_of_the_batch(kind: str) -> None:
    task = tasks()[kind]
    gradients = Gradients(task, task.model())
    indices = torch.tensor([5, 3, 3, 58])
    flat = gradients.of(indices, (0,)).clone()
    gradients.model.zero_grad(set_to_none=False)
    task.loss(gradients.model, task.batch(task.train, indices)).backward()  # type: ignore[no-untyped-call]
    assert torch.equal(flat, gradients.flat)


@pytest.mark.parametrize("kind", ["tuple", "dict", "regression"])
def test_a_batch_in_pieces_has_the_same_gradient(kind: str) -> None:
    whole = tasks()[kind]
    torch.manual_seed(0)
    model = whole.model()
    pieces = replace(whole, model=model, samples_per_pass=3)
    indices = torch.arange(10)
    a = Gradients(whole, model).of(indices, (0,)).clone()
    b = Gradients(pieces, pieces.model()).of(indices, (0,))
    torch.testing.assert_close(a, b)


def test_a_model_is_copied_for_each_run() -> None:
    model = nn.Linear(3, 1)
    before = model.weight.clone()
    task = regression(model=model)
    run = Run(config(), task)
    run.step()
    assert torch.equal(model.weight, before)
    assert torch.equal(task.model().get_parameter("weight"), before)
    assert not torch.equal(run.model.get_parameter("weight"), before)


def test_the_joint_pass_trains_a_regression_and_leaves_other_tasks_to_the_workers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    together, alone = Machine(together=True), Machine()
    joint, one = (
        Run(config(momentum=0.0, zeros="abstain"), regression(), machine) for machine in (together, alone)
    )
    for run in (joint, one):
        for _ in range(3):
            run.step()
    assert not isinstance(joint.workers, OneByOne)
    for name, values in one.history["evaluations"].items():
        assert joint.history["evaluations"][name] == pytest.approx(values, rel=1e-5)
    _log_fallback.cache_clear()
    for kind in ("no labels", "data set"):
        assert isinstance(Run(config(), tasks()[kind], together).workers, OneByOne)
    for kind in ("tuple", "dict", "tokens", "pixels"):
        assert not isinstance(Run(config(), tasks()[kind], together).workers, OneByOne)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the joint pass cannot train this task: it needs a loss of outputs and labels" in caplog.text


# ---- one sentence --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": lambda: nn.Linear(4, 1)}, r"cannot compute a loss of 2 samples, inputs \(2, 3\) and labels"),
        ({"model": lambda: nn.Linear(3, 2)}, r"outputs have shape \(2, 2\) and labels \(2, 1\); they must be equal"),
        ({"loss": lambda model, batch: model(batch.inputs)}, r"the loss is torch.float32 of shape \(2, 1\); it must"),
        ({"loss": lambda model, batch: 1.0}, "the loss is float; it must be a tensor with one number"),
        ({"metrics": (Measure(name="m", values=lambda o, y: o.mean()),)}, r"'m' has values of shape \(\) for 2"),
        ({"metrics": (Measure(name="m", values=lambda o, y: y @ o),)}, "cannot compute metrics of 2 samples.*Runt"),
        ({"loss": cross_entropy, "metrics": ()}, r"accuracy needs labels of shape \(2,\), a class each"),
        ({"train": Rows([*[torch.zeros(3)] * 99, torch.zeros(4)])}, "cannot read training data of 2 samples"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_sentence(changes: dict[str, Any], text: str) -> None:
    data = Data(inputs=X, labels=Y)
    usual: dict[str, Any] = {
        "model": lambda: nn.Linear(3, 1),
        "loss": squared_error,
        "train": data,
        "test": data,
    }
    state = torch.random.get_rng_state()
    with pytest.raises(ConfigError, match=text) as caught:
        Run(config(), Task(name="own", **usual | changes))
    assert "task 'own'" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_loss_of_outputs_and_labels_has_another_name() -> None:
    with pytest.raises(
        ConfigError, match=r"a loss takes a model and a batch.*use task\.loss\.of\(outputs, labels\)"
    ):
        squared_error(X, Y)  # type: ignore[arg-type]
    assert torch.equal(squared_error.of(X, X + 2), torch.tensor(4.0))


def test_data_that_are_none() -> None:
    with pytest.raises(ConfigError, match=r"the data are int; wanted signvote\.tasks\.Data, or a data set"):
        Task(name="own", train=7, test=7, model=nn.Identity)
    with pytest.raises(ConfigError, match="the data set has 0 samples"):
        Items(Rows([]))
    with pytest.raises(ConfigError, match="a sample has 3 parts; wanted a pair"):
        Items(Rows([(1, 2, 3)]))


def test_an_input_of_another_shape_is_named() -> None:
    with pytest.raises(ConfigError, match=r"training input has shape \(\(3,\), \(\)\), a test input \(3,\)"):
        Task(name="own", train=Data(inputs=(X, PLACES)), test=Data(inputs=X), model=nn.Identity)


@pytest.mark.parametrize("how", ["dirichlet:0.5", "labels:2"])
@pytest.mark.parametrize("data", [Data(inputs=X, labels=Y), Data(inputs=X), Items(TensorDataset(X, Y))])
def test_a_split_by_class_needs_classes(how: str, data: Samples) -> None:
    with pytest.raises(ConfigError, match=f"split is '{how}'; it needs class labels.*use shared or iid"):
        split(data, 3, how, 0)
    assert sum(map(len, split(data, 3, "iid", 0))) == N


def test_classes_of_a_data_set_are_those_of_its_items() -> None:
    rows = [(x, int(place)) for x, place in zip(X, PLACES, strict=True)]
    items, data = Items(Rows(rows)), Data(inputs=X, labels=PLACES)
    for a, b in zip(split(items, 4, "labels:2", 0), split(data, 4, "labels:2", 0), strict=True):
        assert torch.equal(a, b)


def test_flipped_labels_need_classes() -> None:
    with pytest.raises(
        ConfigError, match=r"attack is 'label-flip:1'; it needs class labels.*task 'own' has none"
    ):
        Run(config(attack="label-flip:1"), regression())
    Run(config(attack="label-flip:0"), regression())


def test_the_rounds_of_the_joint_pass_do_not_ask_for_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look at the labels would wait for the device, which a captured graph cannot."""
    data = Data(inputs=X, labels=PLACES)
    task = Task(name="own", train=data, test=data, model=lambda: nn.Linear(3, 5))
    run = Run(config(), task, Machine(together=True))
    monkeypatch.setattr(Data, "classes", property(lambda self: pytest.fail("asked for classes")))
    run.step()
    run.step()
    assert not isinstance(run.workers, OneByOne)


def test_folders_may_be_texts_and_existing_ones_are_refused_alike(tmp_path: Path) -> None:
    """By `train` and by the command line; `compare`, `write` and `figure` accept texts, too."""
    task = load_task("mnist-10k", str(tmp_path), "mlp")
    config = Config(task="mnist-10k", model="mlp", batch_sizes=(4, 4), rounds=1)
    out = str(tmp_path / "run")
    results = results_of([train(config, task, out)])
    for again in (lambda: train(config, task, out), parse(["train", "--out", out]).run):
        with pytest.raises(ConfigError, match="holds a run already; add --resume to continue it"):
            again()
    figure(results, str(tmp_path / "figure.svg"))
    write(results, out)
    assert compare([config], out)["runs"] == read(results_file(out))["runs"], "nothing is run again"
