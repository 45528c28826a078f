"""Ranks of torch.distributed as processes, for the tests of the engine."""

from __future__ import annotations

import queue
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from signvote.core.groups import parameter_groups
from signvote.engines.ddp import Vote, VoteState, vote_gradients, vote_hook
from signvote.sim import Config
from signvote.sim.population import Sampler, generator, split
from signvote.sim.run import Run
from signvote.tasks import Data, Task

PATIENCE = 900.0  # seconds until something that must happen is given up; nothing is measured by it


def wait_for(happened: Callable[[], bool]) -> None:
    """Wait until something has happened that must happen."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


def together(world: int, work: Callable[..., Any], *args: Any, folder: Path) -> list[Any]:
    """What work(rank, world, *args) returns on each rank; None for one that died."""
    context = mp.get_context("forkserver")  # which has loaded everything once for all
    context.set_forkserver_preload(["tests.warm"])
    answers = context.Queue()
    meeting = folder / f"store-{time.monotonic_ns()}"
    ranks = [
        context.Process(target=_rank, args=(rank, world, str(meeting), work, args, answers), daemon=True)
        for rank in range(world)
    ]
    found: dict[int, Any] = {}
    try:
        for process in ranks:
            process.start()
        deadline = time.monotonic() + PATIENCE
        while len(found) < world and time.monotonic() < deadline:
            try:
                rank, ok, answer = answers.get(timeout=0.2)
            except queue.Empty:
                if any(p.is_alive() and r not in found for r, p in enumerate(ranks)):
                    continue
                break
            assert ok, f"rank {rank}:\n{answer}"
            found[rank] = answer
        assert time.monotonic() < deadline, "the ranks hang"
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return [found.get(rank) for rank in range(world)]


def _rank(rank: int, world: int, meeting: str, work: Any, args: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
        answer = rank, True, work(rank, world, *args)
    except BaseException:
        answer = rank, False, traceback.format_exc()
    answers.put(answer)
    time.sleep(PATIENCE)  # others may still need this one's connections; whoever started it kills it


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A world of one, in this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# ---- what is trained ---------------------------------------------------------------------------------

INPUTS, WIDTH, DEPTH, CLASSES = 20, 16, 12, 3


def deep() -> nn.Module:
    """Many small tensors of odd sizes: 26 of them, 4,000 coordinates."""
    widths = [INPUTS, *(WIDTH + i % 5 for i in range(DEPTH)), CLASSES]
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


@cache
def task() -> Task:
    points = torch.randn(400, INPUTS, generator=torch.Generator().manual_seed(1))
    labels = (points[:, :CLASSES] + 0.3 * points[:, 3:6]).argmax(1)
    data = Data(inputs=points, labels=labels)
    return Task(name="points", train=data, test=data, model=deep)


def config(rule: str, world: int, rounds: int, **more: Any) -> Config:
    sizes = tuple(3 + 5 * (r % 3) for r in range(world))
    settings = {"evaluate_every": rounds, "step": 3e-3, "decay": 0.0, **more}  # decay is the optimizer's
    if rule == "it-signsgd":
        settings["options"] = {"warmup": 5}
    return Config(task="points", rule=rule, batch_sizes=sizes, rounds=rounds, seed=7, **settings)


def fresh(config: Config) -> nn.Module:
    """The model that the simulator starts from."""
    torch.manual_seed(generator(config.seed, 0).initial_seed())
    return task().model()


def simulated(config: Config) -> list[int]:
    """A checksum of the parameters after every round."""
    torch.set_num_threads(1)
    run, sums = Run(config, task()), []
    for _ in range(config.rounds):
        run.step()
        sums.append(zlib.crc32(run.gradients.x.numpy().data))
    return sums


def checksum(model: nn.Module) -> int:
    return zlib.crc32(torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().data)


def make_state(model: nn.Module, config: Config, **more: Any) -> VoteState:
    """As the simulator's settings are; ranks declare batch sizes by themselves."""
    return VoteState(model, config.rule, clip=config.clip, **_settings(config), **more)


def make_optimizer(model: nn.Module, config: Config, **more: Any) -> Vote:
    """Likewise."""
    settings = {"weight_decay": config.decay, **_settings(config), **more}
    if config.decays == "all":
        return Vote(model.parameters(), rule=config.rule, **settings)
    groups = parameter_groups(model, weight_decay=config.decay)
    return Vote(groups, rule=config.rule, **settings)


def _settings(config: Config) -> dict[str, Any]:
    settings: dict[str, Any] = {"momentum": config.momentum, "interpolation": config.interpolation}
    settings["polar"] = config.polar
    settings |= {"zeros": config.zeros, "run": config.seed, "top": config.top, "feedback": config.feedback}
    settings["chunk"] = 1280
    return settings | config.options


class Batches:
    """The batches of the simulator's worker of the same number."""

    def __init__(self, rank: int, config: Config) -> None:
        self._rank = rank
        parts = split(task().train, config.workers, config.split, config.seed)
        self._sampler = Sampler(parts, config.batch_sizes, config.seed)

    def loss(self, net: nn.Module, t: int) -> Tensor:
        chosen = self._sampler.batch(self._rank, t - 1)
        return task().loss(net, task().batch(task().train, chosen))


class Trainer:
    """One rank's training: the batches and steps of the simulator's worker of the same number."""

    def __init__(self, rank: int, config: Config, *, over_ddp: bool = True, **more: Any) -> None:
        self.rank, self.config = rank, config
        self.model = fresh(config)
        self.batches = Batches(rank, config)
        self.net: nn.Module = self.model
        if over_ddp:
            self.net = DistributedDataParallel(self.model, bucket_cap_mb=1e-5)
        self.state = make_state(self.net, config, **more)
        if isinstance(self.net, DistributedDataParallel):
            self.net.register_comm_hook(self.state, vote_hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)

    def loss(self, t: int) -> Tensor:
        return self.batches.loss(self.net, t)

    def step(self) -> None:
        t = self.state.round + 1
        if self.config.top_end is not None:
            self.state.top = self.config.top_at(t)
        self.optimizer.param_groups[0]["lr"] = self.config.step_at(t)
        self.optimizer.zero_grad()
        self.loss(t).backward()  # type: ignore[no-untyped-call]
        if self.net is self.model:
            vote_gradients(self.state)
        self.optimizer.step()

    def train(self, rounds: int) -> list[int]:
        """A checksum of the parameters after every round."""
        sums = []
        for _ in range(rounds):
            self.step()
            sums.append(checksum(self.model))
        return sums


def trained(rank: int, world: int, cases: Sequence[tuple[Config, dict[str, Any]]]) -> list[list[int]]:
    """Each case in turn, by the same processes."""
    return [Trainer(rank, config, **how).train(config.rounds) for config, how in cases]
