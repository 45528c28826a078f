"""What does a step of the optimizer cost, beside those of torch.optim?

    python -m benchmarks.optimizer_step                     # one CPU thread: step() alone, 25 million coordinates
    python -m benchmarks.optimizer_step --device cuda       # whole training steps of gpt-small, bf16
    python -m benchmarks.optimizer_step --parts             # where the host's time goes in step(); --device cuda, too

There is one worker and no communication. Optimizers take turns, and the table has medians; the ratios are what counts.

On a CPU every optimizer has parameters of its own and all get the same gradients, normal numbers. The tensors are those
of a language model of 6 layers. `copy` copies as many float32 numbers once.

On a GPU a step is forward and backward pass, optimizer and `zero_grad`: 64 sequences of 256 bytes, a model of 6 layers
of width 256. Steps are timed with CUDA events, several in a row, so that the host may run ahead of the device as it
does in training. `forward and backward` has no optimizer. `host` are the seconds until the host has queued a step.
`--parts` takes steps without a model around them. For each optimizer it shows the host's microseconds, the operators of
PyTorch that a step dispatches, and the functions that Python calls; these two are the same in every run. For Vote it
shows the calls of PyTorch and CUDA in one step, and the functions in which Python spends most time. A profiler makes
these slower. On a CPU tensors are tiny then, so that kernels cost next to nothing.

Writes benchmarks/optimizer_step.json.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from signvote.engines.ddp import Vote

BYTES = 256  # the vocabulary
CONTEXT = 256
SEQUENCES = 64
LAYERS = 6
SMALL = 256  # width on a GPU
WIDE = 592  # 25.6 million coordinates
HEADS = 8
DECAY = 0.1
WARM_UP = 5  # steps
BLOCK = 10  # steps in a row on a GPU
TINY = 8  # width, where only the host's time matters
STEPS = 100  # whose parts are looked at
SHOWN = 25  # functions
HOST = "AdamW foreach"  # what the host's time is compared with

Make = Callable[[Sequence[Tensor]], Optimizer]

ON_CPU: dict[str, Make] = {
    "SGD foreach": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9, weight_decay=DECAY, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9, weight_decay=DECAY, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=DECAY, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=DECAY, fused=True),
    "Vote": lambda p: Vote(p, 1e-3, momentum=0.9, weight_decay=DECAY),
}
ON_GPU: dict[str, Make] = {
    "AdamW fused": lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=DECAY, fused=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9, weight_decay=DECAY, foreach=True),
    "Vote": lambda p: Vote(p, 1e-3, momentum=0.9, weight_decay=DECAY),
    "Vote, overlap": lambda p: Vote(p, 1e-3, momentum=0.9, weight_decay=DECAY, overlap=True),
}


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The seconds of one step, a median."""

    name: str
    seconds: float
    host: float | None = None  # until the host has queued it


# ---- the model -----------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and a perceptron, each behind a layer norm and beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.between = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(n, time, width), in and out."""
        n, time, width = x.shape
        mixed = self.mix(self.before(x)).view(n, time, 3, HEADS, width // HEADS)
        query, key, value = mixed.permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, time, width))
        grown = F.gelu(self.up(self.between(x)))
        out: Tensor = x + self.down(grown)
        return out


class Gpt(nn.Module):
    """A language model on bytes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(BYTES, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """(n, time) -> (n, time, BYTES)."""
        x = self.symbols(text) + self.places.weight[: text.shape[1]]
        out: Tensor = self.head(self.norm(self.blocks(x)))
        return out


# ---- one CPU thread ------------------------------------------------------------------------------


def on_cpu(repeats: int) -> list[Timing]:
    """Seconds of `step()` alone, and of a copy."""
    torch.set_num_threads(1)
    gradients = [torch.randn_like(p) for p in Gpt(WIDE).parameters()]
    flat = torch.randn(sum(g.numel() for g in gradients))
    target = torch.empty_like(flat)
    steps: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(flat)}
    for name, make in ON_CPU.items():
        parameters = list(Gpt(WIDE).parameters())
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        steps[name] = make(parameters).step
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in track(range(WARM_UP + repeats), description="steps", transient=True):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    return [Timing(name=name, seconds=median(taken)) for name, taken in seconds.items()]


# ---- a GPU ---------------------------------------------------------------------------------------


def on_gpu(repeats: int) -> list[Timing]:
    """Seconds of training steps."""
    text = torch.randint(BYTES, (SEQUENCES, CONTEXT + 1), device="cuda")
    trainings: dict[str, Callable[[], None]] = {"forward and backward": _training(text, None)}
    for name, make in ON_GPU.items():
        trainings[name] = _training(text, make)
    for train in trainings.values():
        for _ in range(WARM_UP):
            train()
    timings: dict[str, list[tuple[float, float]]] = {name: [] for name in trainings}
    for _ in track(range(repeats), description="blocks of steps", transient=True):
        for name, train in trainings.items():
            timings[name].append(_block(train))
    return [
        Timing(
            name=name,
            seconds=median(seconds for seconds, _ in taken),
            host=median(host for _, host in taken),
        )
        for name, taken in timings.items()
    ]


def _training(text: Tensor, make: Make | None) -> Callable[[], None]:
    """A function that takes one training step of a model of its own."""
    torch.manual_seed(0)
    model = Gpt(SMALL).cuda()
    optimizer = None if make is None else make(list(model.parameters()))
    return partial(_train, model, optimizer, text)


def _train(model: nn.Module, optimizer: Optimizer | None, text: Tensor) -> None:
    """A training step."""
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        outputs = model(text[:, :-1])
        loss = F.cross_entropy(outputs.flatten(0, 1), text[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    if optimizer is not None:
        optimizer.step()


def _block(train: Callable[[], None]) -> tuple[float, float]:
    """Seconds of a step on the device, and on the host: means of several in a row."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    train()
    torch.cuda.synchronize()
    first.record()
    start = time.perf_counter()
    for _ in range(BLOCK):
        train()
    host = time.perf_counter() - start
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3 / BLOCK, host / BLOCK


# ---- the host's time -----------------------------------------------------------------------------


def parts(device: str) -> list[Table]:
    """What `step()` costs the host, by optimizer; then what one step of Vote is made of."""
    torch.set_num_threads(1)
    makes = ON_GPU | {HOST: ON_CPU[HOST]}
    steps = {name: _step_alone(make, device) for name, make in makes.items()}
    return [_hosts(steps), _calls_of(steps["Vote"], device), _functions_of(steps["Vote"])]


def _hosts(steps: dict[str, Callable[[], object]]) -> Table:
    """The host's time in a step, a median, and how often a step calls something."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(STEPS):
        for name, step in steps.items():
            seconds[name].append(_seconds_of(step))
    yardstick = median(seconds[HOST])
    table = Table("step()", "host us", f"/ {HOST}", "operators", "functions")
    for name, step in steps.items():
        host = median(seconds[name])
        operators = _operators_in(step)
        functions = _functions_in(step)
        table.add_row(name, f"{1e6 * host:.0f}", f"{host / yardstick:.2f}", str(operators), str(functions))
    return table


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators of PyTorch that are dispatched."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, operator: Callable[..., object], types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        """Count one, and run it."""
        self.count += 1
        return operator(*args, **(kwargs or {}))


def _operators_in(step: Callable[[], object]) -> int:
    operators = _Operators()
    with operators:
        step()
    return operators.count


def _functions_in(step: Callable[[], object]) -> int:
    """The functions, of Python and C, that one step calls: a mean."""
    profile = cProfile.Profile()
    for _ in range(STEPS):
        profile.runcall(step)
    calls = int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]
    return calls // STEPS


def _step_alone(make: Make, device: str) -> Callable[[], object]:
    """A step of an optimizer whose gradients stay the same."""
    parameters = list(Gpt(SMALL if device == "cuda" else TINY).to(device).parameters())
    optimizer = make(parameters)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    for _ in range(WARM_UP):
        optimizer.step()
    return optimizer.step


def _seconds_of(step: Callable[[], object]) -> float:
    """Of this thread alone: others may use the processor."""
    start = time.thread_time()
    step()
    return time.thread_time() - start


def _calls_of(step: Callable[[], object], device: str) -> Table:
    """What PyTorch and CUDA are called for in one step."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        step()
    averages = sorted(profile.key_averages(), key=lambda each: -each.self_cpu_time_total)
    table = Table("call", "in a step", "us")
    for each in averages:
        if each.self_cpu_time_total:
            table.add_row(each.key, str(each.count), f"{each.self_cpu_time_total:.0f}")
    return table


def _functions_of(step: Callable[[], object]) -> Table:
    """The functions with most time of their own."""
    profile = cProfile.Profile()
    for _ in range(STEPS):
        profile.runcall(step)
    found = pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
    table = Table("function", "calls", "us", "us with what it calls")
    for (path, line, name), (_, calls, own, whole, _) in sorted(found, key=lambda item: -item[1][2])[:SHOWN]:
        where = f"{Path(path).name}:{line} {name}" if line else name
        numbers = (calls, 1e6 * own, 1e6 * whole)
        table.add_row(where, *(f"{number / STEPS:.0f}" for number in numbers))
    return table


# ---- what it means -------------------------------------------------------------------------------


def table_of(timings: Sequence[Timing], yardsticks: Sequence[str]) -> Table:
    """Milliseconds, and ratios to some of the rows."""
    by_name = {timing.name: timing for timing in timings}
    table = Table("", "ms", *(f"/ {name}" for name in yardsticks), "host ms")
    for timing in timings:
        ratios = [f"{timing.seconds / by_name[name].seconds:.2f}" for name in yardsticks]
        host = "" if timing.host is None else f"{1e3 * timing.host:.2f}"
        table.add_row(timing.name, f"{1e3 * timing.seconds:.2f}", *ratios, host)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=30, help="of each optimizer")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--parts", action="store_true", help="show where the host's time goes instead")
    options = parser.parse_args()
    if options.parts:
        Console().print(*parts(options.device))
        return
    if options.device == "cpu":
        timings = on_cpu(options.repeats)
        yardsticks = ["copy", "SGD foreach", "AdamW fused"]
    else:
        timings = on_gpu(options.repeats)
        yardsticks = ["AdamW fused", "forward and backward"]
    options.out.write_text(json.dumps([asdict(timing) for timing in timings], indent=1) + "\n")
    Console().print(table_of(timings, yardsticks))


if __name__ == "__main__":
    main()
