"""Tasks: how inputs are prepared, models, augmentation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from signvote.errors import ConfigError
from signvote.tasks import MODELS, Batch, Data, Task, cross_entropy, load_task
from signvote.tasks.augment import Augment, crop_and_flip
from signvote.tasks.gpt import GPTS

CIFAR_BYTES = 10_000 * 3073
LABELS = torch.arange(7) % 3


def images(n: int, *shape: int) -> Tensor:
    return torch.randint(256, (n, *shape), dtype=torch.uint8)


def tiny_task(**changes: Any) -> Task:
    data = Data(inputs=images(7, 2, 4, 4), labels=LABELS)
    settings: dict[str, Any] = {"name": "tiny", "train": data, "test": data, "model": nn.Flatten}
    return Task(**(settings | {"mean": (0.5, 0.25), "deviation": (0.5, 2.0)} | changes))


def parameters(name: str) -> int:
    return sum(p.numel() for p in MODELS[name]().parameters())


# Data and Task


def test_a_users_own_task_takes_a_few_lines() -> None:
    points = torch.randn(200, 2)
    data = Data(inputs=points, labels=(points.sum(1) > 0).long())
    task = Task(name="half-planes", train=data, test=data, model=lambda: nn.Linear(2, 2))

    model = task.model()
    everything = task.batch(task.train, torch.arange(200))
    first = task.loss(model, everything)
    for _ in range(50):
        loss = task.loss(model, everything)
        for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            p.data -= 0.5 * g
    assert len(task.train) == 200
    assert loss < 0.5 * first


@pytest.mark.parametrize(
    ("inputs", "labels", "text"),
    [
        (torch.zeros(3, 2), torch.zeros(4, dtype=torch.int64), "3 inputs and 4 labels; they must be as many"),
        (torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), "0 inputs and 0 labels; .* at least 1"),
        (torch.tensor(1.0), torch.zeros(1, dtype=torch.int64), "0 inputs and 1 labels"),
        ((torch.zeros(3, 2), torch.zeros(4)), torch.zeros(3), "3 or 4 inputs and 3 labels"),
        (
            {"a": torch.zeros(3), "b": "text"},
            None,
            "inputs are str; wanted a tensor, or a tuple or dict of tensors",
        ),
        (torch.zeros(3), {"a": 7}, "labels are int; wanted a tensor"),
        ({}, None, "0 inputs; they must be as many, at least 1"),
    ],
)
def test_data_that_does_not_fit_together(inputs: Any, labels: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Data(inputs=inputs, labels=labels)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mean": (0.5,)}, "1 means and 2 deviations for inputs with 2 channels; uint8 images"),
        ({"deviation": ()}, "2 means and 0 deviations"),
        ({"mean": (), "deviation": ()}, "0 means and 0 deviations for inputs with 2 channels"),
        ({"deviation": (1.0, 0.0)}, r"deviation is \(1.0, 0.0\); every one must be above 0"),
        ({"recipe": "texts"}, "there is no recipe 'texts'; did you mean 'text'"),
        ({"samples_per_pass": 0}, "samples_per_pass is 0; it must be 1 or more, or None"),
        (
            {"test": Data(inputs=images(7, 2, 5, 4), labels=LABELS)},
            r"training input has shape \(2, 4, 4\), a test input \(2, 5, 4\)",
        ),
        ({"test": Data(inputs=torch.zeros(7, 2, 4, 4), labels=LABELS)}, "2 means .* other inputs none"),
    ],
)
def test_a_task_that_does_not_fit_together(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        tiny_task(**changes)


def test_images_are_normalised_per_channel_and_lie_channels_last() -> None:
    task = tiny_task()
    x = task.prepare(task.train.inputs)
    mean, deviation = torch.tensor([0.5, 0.25])[:, None, None], torch.tensor([0.5, 2.0])[:, None, None]
    assert x.dtype == torch.float32
    assert x.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(x, (task.train.inputs.double() / 255 - mean).div(deviation).float())


def test_images_of_one_channel_lie_channels_last_too() -> None:
    """Their bytes are the same either way, but convolutions choose their way by the strides."""
    x = load_task("mnist-10k").prepare(images(3, 1, 28, 28))
    assert x.stride() == (784, 1, 28, 1)


@pytest.mark.parametrize(
    "inputs", [torch.randn(7, 5), torch.arange(14).reshape(7, 2), torch.randn(7, 3, 2, 2)]
)
def test_other_inputs_are_used_as_they_are(inputs: Tensor) -> None:
    data = Data(inputs=inputs, labels=LABELS)
    x = Task(name="own", train=data, test=data, model=nn.Flatten).prepare(inputs)
    assert torch.equal(x, inputs)
    assert x.dtype == inputs.dtype
    assert x.ndim != 4 or x.is_contiguous(memory_format=torch.channels_last)


def test_only_training_augments() -> None:
    black = Augment(lambda n, _: torch.zeros(1, n), lambda inputs, _: torch.zeros_like(inputs))
    task, inputs = tiny_task(augment=black), images(7, 2, 4, 4)
    draws = task.draw(7, torch.Generator())
    assert torch.equal(task.prepare(inputs), tiny_task().prepare(inputs))
    assert torch.equal(task.prepare(inputs, draws), task.prepare(torch.zeros_like(inputs)))
    assert tiny_task().draw(7, torch.Generator()) is None


def test_the_loss_is_the_mean_cross_entropy() -> None:
    outputs = torch.randn(7, 3)
    expected = -outputs.log_softmax(1)[torch.arange(7), LABELS].mean()
    torch.testing.assert_close(tiny_task().loss(nn.Identity(), Batch(outputs, LABELS)), expected)


# augmentation


def changed(images: Tensor, seed: int) -> Tensor:
    draws = crop_and_flip.draw(len(images), torch.Generator().manual_seed(seed))
    return crop_and_flip.change(images, draws)


def windows(image: Tensor) -> list[Tensor]:
    """Every crop of the padded image, plain and mirrored."""
    padded = F.pad(image, [4] * 4)
    height, width = image.shape[1:]
    crops = [padded[:, y : y + height, x : x + width] for y in range(9) for x in range(9)]
    return crops + [crop.flip(-1) for crop in crops]


def test_augmented_images_are_windows_of_the_padded_one() -> None:
    batch = images(40, 3, 8, 6)
    out = changed(batch, 1)
    assert out.shape == batch.shape
    assert out.dtype == torch.uint8
    seen = [
        [torch.equal(new, w) for w in windows(old)].index(True) for old, new in zip(batch, out, strict=True)
    ]
    assert len(set(seen)) > 20  # of 162 windows, drawn 40 times
    assert {index >= 81 for index in seen} == {False, True}


def test_every_window_is_as_likely() -> None:
    """The place a single white pixel moves to: 9 x 9 places, each as often."""
    n = 81 * 400
    batch = torch.zeros(n, 1, 9, 9, dtype=torch.uint8)
    batch[:, :, 4, 4] = 1
    out = changed(batch, 2)
    counts = out.sum((0, 1), dtype=torch.int64)
    assert int(counts.sum()) == n
    assert int((counts - 400).abs().max()) < 5 * 20  # five standard deviations


def test_augmentation_depends_on_the_generator_only() -> None:
    batch = images(10, 3, 32, 32)
    one, again, other = (changed(batch, s) for s in (1, 1, 2))
    torch.manual_seed(5)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


# models


@pytest.mark.parametrize(
    ("name", "count", "shape"),
    [
        ("mnist-cnn", 582_026, (1, 28, 28)),
        ("resnet20", 269_722, (3, 32, 32)),
        ("resnet20-gn", 269_722, (3, 32, 32)),
        ("resnet56", 853_018, (3, 32, 32)),
        ("mlp", 784 * 64 + 64 + 64 * 10 + 10, (1, 28, 28)),
    ],
)
def test_parameters_and_outputs(name: str, count: int, shape: tuple[int, ...]) -> None:
    assert parameters(name) == count
    assert MODELS[name]()(torch.randn(5, *shape)).shape == (5, 10)
    assert not list(MODELS[name]().buffers())  # nothing that an update by votes would miss


def test_every_model_is_tested() -> None:
    assert set(MODELS) == {"mnist-cnn", "resnet20", "resnet20-gn", "resnet56", "mlp", *GPTS}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_fresh_and_the_callers_seed_decides(name: str) -> None:
    def weights(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return torch.cat([p.detach().flatten() for p in MODELS[name]().parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def relu_before_pooling(model: nn.Module, x: Tensor) -> Tensor:
    """The paper's CNN as the paper writes it."""
    x = F.max_pool2d(F.relu(model.get_submodule("conv1")(x)), 2)
    x = F.max_pool2d(F.relu(model.get_submodule("conv2")(x)), 2)
    x = F.relu(model.get_submodule("fc1")(x.flatten(1)))
    out: Tensor = model.get_submodule("fc2")(x)
    return out


def test_relu_after_pooling_changes_no_gradient() -> None:
    task = load_task("mnist-10k")
    model, (x, labels) = task.model(), task.batch(task.train, torch.arange(32))
    grads = [
        torch.autograd.grad(cross_entropy.of(outputs, labels), list(model.parameters()))
        for outputs in (model(x), relu_before_pooling(model, x))
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
        assert torch.equal(a == 0, b == 0)


def test_a_resnet_normalises_by_the_batch_also_in_evaluation() -> None:
    model, x = MODELS["resnet20"](), torch.randn(8, 3, 32, 32)
    trained = model.train()(x)
    assert torch.equal(model.eval()(x), trained)
    assert not torch.allclose(model(x[:4]), trained[:4])


def test_with_group_norm_a_sample_does_not_depend_on_its_batch() -> None:
    model, x = MODELS["resnet20-gn"](), torch.randn(8, 3, 32, 32)
    torch.testing.assert_close(model(x[:4]), model(x)[:4])


def test_a_shortcut_keeps_every_second_pixel_and_adds_zero_channels() -> None:
    block = MODELS["resnet20"]().get_submodule("blocks.3")
    for parameter in block.parameters():
        nn.init.zeros_(parameter)  # the shortcut is all that is left
    x = torch.rand(2, 16, 8, 8)
    out = block(x)
    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2])
    assert not out[:, :8].any()
    assert not out[:, 24:].any()


def test_resnet_weights_start_kaiming_normal() -> None:
    weight = MODELS["resnet20"]().get_parameter("blocks.8.conv2.weight").detach()
    assert float(weight.std()) == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.03)


# the bundled data
