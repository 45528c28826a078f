"""The gradients of all workers in one pass: what each would compute by itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signvote.core.layout import Layout, trainable
from signvote.sim import Run
from signvote.sim.joint.crew import Crew, NotTogetherError
from signvote.sim.joint.layers import SideBySide
from signvote.sim.joint.parts import Parts
from signvote.sim.joint.together import Together
from signvote.sim.machine import Machine
from signvote.sim.setup import _log_fallback
from signvote.sim.workers import OneByOne
from signvote.tasks import MODELS, Data, Task
from signvote.tasks.gpt import Gpt
from signvote.tasks.losses import token_cross_entropy
from signvote.tasks.models import BatchNormReLU
from signvote.tasks.text import Windows
from tests.joint import CPU, DEVICES, INTERPRETED, SIZES, TOKENS, finished, small


def crew_of(model: nn.Module, device: str = "cpu") -> Crew:
    model.to(device)
    parameters = trainable(model)
    layout = Layout.of(parameters)
    return Crew(
        parts=Parts(SIZES, torch.device(device)),
        gradients=torch.full((len(SIZES), layout.size), torch.nan, device=device),
        layout=layout,
        parameters=parameters,
        dtype=torch.float32,
        triton=device == "cuda" or (INTERPRETED and isinstance(model, Odd | Narrow)),
    )


class Odd(nn.Module):
    """What the models of the tasks do not have: strides, biases, odd channels, batch norm without relu."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 5, (3, 2), stride=(2, 1), padding=(1, 0))
        self.norm = nn.BatchNorm2d(5, track_running_stats=False)
        self.fc = nn.Linear(5, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.conv(x)).mean((2, 3)))  # type: ignore[no-any-return]


class Narrow(nn.Module):
    """16 channels to 16, which have a kernel of their own, and a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 16, 3, padding=1, bias=False)
        self.conv = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.norm = BatchNormReLU(16)
        self.fc = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.fc(self.norm(self.conv(x), x).mean((2, 3)))  # type: ignore[no-any-return]


class Attentive(nn.Module):
    """PyTorch's own attention, with what it returns and what it may be told."""

    def __init__(self, *, first: bool, padded: bool = False) -> None:
        super().__init__()
        self.first = first
        self.padded = padded
        self.tokens = nn.Embedding(9, 8, padding_idx=-1)
        self.mix = nn.MultiheadAttention(8, 2, batch_first=first)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        padding = (x == 8) if self.padded else None
        x = self.tokens(x)
        x = x if self.first else x.transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(5).to(x.device)
        if self.padded:
            mask = mask.isinf()
        mixed, weights = self.mix(x, x, x, padding, attn_mask=mask, need_weights=self.first)
        if weights is not None:
            mixed = mixed + weights.mean((1, 2))[:, None, None]
        last = mixed[:, -1] if self.first else mixed[-1]
        return self.fc(last)  # type: ignore[no-any-return]


class Rooted(nn.Module):
    """RMS norm, a frozen norm, a layer that is called twice, a frozen embedding, positions in a row of one."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 8).requires_grad_(False)
        self.places = nn.Embedding(5, 8)
        self.norm = nn.RMSNorm(8)
        self.frozen = nn.LayerNorm(8).requires_grad_(False)
        self.plain = nn.LayerNorm(8, elementwise_affine=False)
        self.twice = nn.Linear(8, 8)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.places(torch.arange(5, device=x.device)[None])
        x = self.frozen(self.norm(x))
        x = self.plain(self.twice(self.twice(x).tanh()))
        return self.fc(x.mean(1))  # type: ignore[no-any-return]


def tiny_gpt() -> nn.Module:
    """Its head is tied to its embedding."""
    return Gpt(context=5, width=8, layers=2, heads=2)


def encoder_layer() -> nn.Module:
    """PyTorch's own transformer layer."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(nn.Embedding(9, 8), layer, nn.Flatten(), nn.Linear(40, 3))


def of_logits(outputs: Tensor, labels: Tensor) -> Tensor:
    """The loss of each sample: (n, classes), or (n, length, classes) of which the last place counts."""
    logits = outputs if outputs.ndim == 2 else outputs[:, -1]
    return nn.functional.cross_entropy(logits, labels, reduction="none")


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")  # Triton's
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (MODELS["mnist-cnn"], (1, 28, 28)),
        (MODELS["resnet20"], (3, 32, 32)),
        (MODELS["resnet20-gn"], (3, 32, 32)),
        (MODELS["mlp"], (1, 28, 28)),
        (Odd, (2, 9, 6)),
        (Narrow, (2, 9, 6)),
        (lambda: nn.Linear(4, 3), (4,)),
        (tiny_gpt, TOKENS),
        (lambda: Attentive(first=True), TOKENS),
        (lambda: Attentive(first=False), TOKENS),
        (lambda: Attentive(first=True, padded=True), TOKENS),
        (Rooted, TOKENS),
        (encoder_layer, TOKENS),
    ],
)
def test_each_worker_gets_its_own_gradient(make: Any, shape: tuple[int, ...], device: str) -> None:
    """With TRITON_INTERPRET=1 the small ones also run through what a GPU would do."""
    torch.manual_seed(0)
    model = make()
    crew = crew_of(model, device)
    samples = sum(SIZES)
    x = torch.randint(8, (samples, 5)) if shape == TOKENS else torch.randn(samples, *shape)
    if shape == TOKENS:
        x[::2, 1] = 8  # padding, where there is any
    x = x.to(device)
    labels = torch.randint(3, (samples,), device=device)
    share = (1 / torch.tensor(SIZES, device=device))[crew.parts.owner.long()]
    with Machine(device=device, precision="float32").ready():
        for _ in range(2):  # nothing is left over from the first pass
            crew.begin()
            with SideBySide(crew):
                outputs = model(x)
            (of_logits(outputs, labels) * share).sum().backward()  # type: ignore[no-untyped-call]
            crew.finish()
        parameters = trainable(model)
        assert all(parameter.grad is None for parameter in parameters.values())
        for m, (mine, its) in enumerate(zip(torch.split(x, SIZES), torch.split(labels, SIZES), strict=True)):
            model.zero_grad()
            of_logits(model(mine), its).mean().backward()  # type: ignore[no-untyped-call]
            alone = torch.cat([parameters[s.name].grad.flatten() for s in crew.layout.segments])  # type: ignore[union-attr]
            error = (crew.gradients[m] - alone).norm() / alone.norm()
            assert error < 5e-3, (m, error)  # a relu near zero may go either way


class Detour(torch.autograd.Function):
    """x * scale, where no function of PyTorch sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * scale

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        return None, (g * ctx.saved_tensors[0]).sum(0)


def detour(x: Tensor, scale: Tensor) -> Tensor:
    return Detour.apply(x, scale)  # type: ignore[no-untyped-call,no-any-return]


class Own(nn.Module):
    """A model with one operation of its own."""

    def __init__(self, work: Callable[[Own, Tensor], Tensor]) -> None:
        super().__init__()
        self.work = work
        self.scale = nn.Parameter(torch.ones(4))
        self.keys = nn.Parameter(torch.ones(1, 1, 4))
        self.fc = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(4)
        self.grid = nn.LayerNorm((4, 4))
        self.mix = nn.MultiheadAttention(4, 1, batch_first=True)
        self.biased = nn.MultiheadAttention(4, 1, batch_first=True, add_bias_kv=True)
        self.tokens = nn.Embedding(3, 4, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.work(self, x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (lambda own, x: x * own.scale, "its model calls mul with a parameter"),
        (lambda own, x: x + own.keys[:, 0], r"its model calls \w*getitem\w* with a parameter"),
        (lambda own, x: torch.cat([own.keys, own.keys])[0] + x, "its model calls cat with a parameter"),
        (lambda own, x: x if len(x) == 2 else x.view(10, 5), "its model fails on the samples of all workers: shape"),
        (lambda own, x: own.norm(x), "its batch norm keeps running statistics"),
        (lambda own, x: own.grid(x[:, None] + x[..., None])[:, 0], r"its norm has a weight of \(4, 4\)"),
        (lambda own, x: x - x.mean(0), "its model mixes samples of different workers"),
        (lambda own, x: own.fc.weight.detach()[:, :4].sum(0) + own.fc(x).sum(1, True) * x.flip(0), "mixes samples"),
        (lambda own, x: own.fc(x[0]).sum() + x, r"gives a linear layer a tensor of \(4,\), not a row"),
        (lambda own, x: own.mix(x[:, None], x[:, None] + 1, x[:, None])[0][:, 0], "its attention is not that of"),
        (lambda own, x: own.biased(*[x[:, None]] * 3)[0][:, 0], "its attention has add_zero_attn, add_bias_kv"),
        (lambda own, x: own.tokens(x[:, 0].long().clamp(0, 2)), "its embedding has max_norm"),
        (lambda own, x: detour(x, own.scale), "a parameter of its model is used"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_together_is_said_and_runs_one_by_one(
    work: Callable[[Own, Tensor], Tensor], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = Data(inputs=torch.randn(40, 4), labels=torch.randint(3, (40,)))
    task = Task(name="own", train=data, test=data, model=lambda: Own(work))
    _log_fallback.cache_clear()
    run = Run(small(task="own", model=None, batch_sizes=tuple(SIZES), rounds=1), task, Machine(together=True))
    assert isinstance(run.workers, OneByOne)
    assert re.search(f"the joint pass cannot train this task: .*{why}", caplog.text)


@pytest.mark.parametrize(
    "model",
    [
        nn.Conv2d(4, 4, 3, groups=2),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 4, 3, padding="same"),
    ],
)
def test_layers_of_images_that_are_not_known(model: nn.Module) -> None:
    with pytest.raises(NotTogetherError, match=r"its (convolution|batch norm)"), SideBySide(crew_of(model)):
        model(torch.randn(sum(SIZES), 4, 5, 5))


def test_dropout_repeats_with_the_seed(digits: Task) -> None:
    """The masks depend on the run and the round alone, so a resumed run has the same; a test has none."""
    model = lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(784, 10))  # noqa: E731
    task = Task(name="own", train=digits.train, test=digits.test, model=model, mean=(0.1,), deviation=(0.3,))
    config = small(task="own", model=None, rounds=4)
    torch.manual_seed(1)
    whole = finished(config, task, Machine(together=True))
    assert isinstance(whole.workers, Together)
    torch.manual_seed(2)
    first = Run(config, task, Machine(together=True))
    for _ in range(2):
        first.step()
    rest = Run(config, task, Machine(together=True))
    rest.load_state_dict(first.state_dict())
    for _ in range(2):
        rest.step()
    assert torch.equal(rest.gradients.x, whole.gradients.x)
    plain = finished(replace(config, seed=1), task, Machine(together=True))
    assert not torch.equal(plain.gradients.x, whole.gradients.x)
    assert rest.workers.evaluate() == rest.workers.evaluate()


@pytest.mark.parametrize("context", [8, sum(SIZES)])
def test_a_language_model_together_is_the_run_one_by_one(context: int) -> None:
    """Close, not equal: a sum's order differs, and near zero a sign may change.

    As many positions as there are samples are still the same for every sample.
    """
    text = torch.randint(97, 123, (4000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    windows = Windows(text, context)
    model = lambda: Gpt(context=context, width=16, layers=2, heads=2)  # noqa: E731
    task = Task(name="own", train=windows, test=windows, model=model, loss=token_cross_entropy)
    config = small(task="own", model=None, batch_sizes=tuple(SIZES), rounds=4, evaluate_every=2)
    one, all_ = (finished(config, task, Machine(together=way)) for way in (False, True))
    assert (type(one.workers), type(all_.workers)) == (OneByOne, Together)
    assert (one.gradients.x != all_.gradients.x).float().mean() < 0.05
    losses = [run.history["evaluations"]["loss"] for run in (one, all_)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_the_parts_of_a_batch() -> None:
    parts = Parts([2, 2, 5], CPU)
    assert parts.equals() == [(slice(0, 2), slice(0, 4)), (slice(2, 3), slice(4, 9))]
    spans, first = parts.pieces(3)
    assert spans.tolist() == [[0, 2], [2, 4], [4, 7], [7, 9]]
    assert first.tolist() == [0, 1, 2, 4]
    assert parts.owner.tolist() == [0, 0, 1, 1, 2, 2, 2, 2, 2]
