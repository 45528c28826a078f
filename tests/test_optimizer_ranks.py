"""The optimizer over several ranks: the simulator's parameters, whatever a script does around `step()`."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from signvote import ConfigError, Vote
from signvote.engines.ddp import copy_from_majority, load, noop_hook, save
from signvote.errors import EngineError
from signvote.sim import Config
from tests.ranks import Batches, checksum, config, fresh, make_optimizer, simulated, together

ROUNDS = 10
WAYS: list[dict[str, Any]] = [
    {"wrapped": "before", "overlap": False},
    {"wrapped": "after", "overlap": True},
    {"wrapped": "never", "overlap": False},
]
CASES = [("weighted", 0), ("majority", 1), ("it-signsgd", 1), ("weighted", 1), ("robust", 1), ("weighted", 2)]


def settings(rule: str, world: int) -> Config:
    return config(rule, world, ROUNDS, decay=0.5)


class Script:
    """A training script around `Vote`. DDP is made before the optimizer, after it, or never."""

    def __init__(self, rank: int, config: Config, *, wrapped: str = "before", **more: Any) -> None:
        self.config = config
        self.model = fresh(config)
        self.batches = Batches(rank, config)
        self.net: nn.Module = self.model
        if wrapped == "before":
            self.net = self._ddp()
        self.optimizer = make_optimizer(self.model, config, **more)
        if wrapped == "after":
            self.net = self._ddp()

    def _ddp(self) -> DistributedDataParallel:
        return DistributedDataParallel(self.model, bucket_cap_mb=1e-5)

    def backward(self, t: int) -> None:
        self.batches.loss(self.net, t).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        t = self.optimizer.round + 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.step_at(t)
        self.optimizer.zero_grad()
        self.backward(t)
        self.optimizer.step()

    def train(self, rounds: int) -> list[int]:
        """A checksum of the parameters after every round."""
        sums = []
        for _ in range(rounds):
            self.step()
            sums.append(checksum(self.model))
        return sums


# ---- on each rank --------------------------------------------------------------------------------


def by_rules(rank: int, world: int) -> dict[Any, list[int]]:
    return {
        (rule, number): Script(rank, settings(rule, world), **WAYS[number]).train(ROUNDS)
        for rule, number in CASES
    }


def sending(world: int) -> list[Config]:
    """Error feedback; polar factors; Lion's interpolation, where chunks leave one by one, and some do not decay."""
    lion: dict[str, Any] = {"momentum": 0.99, "interpolation": 0.9, "decay": 0.5, "decays": "matrices"}
    return [config("weighted", world, ROUNDS, **more) for more in ({"feedback": True}, {"polar": True}, lion)]


def by_sending(rank: int, world: int) -> list[list[int]]:
    return [Script(rank, case).train(ROUNDS) for case in sending(world)]


def own_gradients(rank: int, world: int) -> dict[str, Any]:
    """DDP averages nothing: after `backward()` a rank has its own gradient."""
    script = Script(rank, settings("weighted", world), wrapped="after")
    alone = fresh(script.config)
    Batches(rank, script.config).loss(alone, 1).backward()  # type: ignore[no-untyped-call]
    script.backward(1)
    pairs = zip(script.model.parameters(), alone.parameters(), strict=True)
    is_own = all(torch.equal(_gradient(p), _gradient(q)) for p, q in pairs)
    script.optimizer.step()
    return {
        "is_own": is_own,
        "repr": repr(script.optimizer),
        "sizes": script.optimizer.batch_sizes,
    }


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def beside_adamw(rank: int, world: int) -> dict[str, Any]:
    """The last layer by AdamW, whose gradients DDP must still average."""
    run = settings("weighted", world)
    model = fresh(run)
    net = DistributedDataParallel(model)
    *others, weight, bias = model.parameters()
    votes = Vote(others)
    adamw = torch.optim.AdamW([weight, bias])
    is_mean = True
    for t in range(1, 4):
        model.zero_grad()
        loss = Batches(rank, run).loss(net, t)
        (own,) = torch.autograd.grad(loss, [bias], retain_graph=True)
        loss.backward()  # type: ignore[no-untyped-call]
        dist.all_reduce(own)
        is_mean &= torch.allclose(_gradient(bias), own / world, atol=1e-7)
        votes.step()
        adamw.step()
    return {"is_mean": is_mean, "sum": checksum(model), "sizes": votes.batch_sizes}


def two_of_them(rank: int, world: int) -> int:
    """Two Votes on one model under one DDP."""
    run = settings("weighted", world)
    model = fresh(run)
    net = DistributedDataParallel(model)
    first, *others = model.parameters()
    optimizers = [Vote([first]), Vote(others, rule="majority")]
    for t in range(1, 4):
        model.zero_grad()
        Batches(rank, run).loss(net, t).backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
    return checksum(model)


def accumulated(rank: int, world: int) -> list[Any]:
    """Two batches a step: DDP's no_sync makes no difference, nor does overlap."""
    answers = []
    for overlap in (False, True):
        script = Script(rank, settings("weighted", world), overlap=overlap)
        assert isinstance(script.net, DistributedDataParallel)
        for t in range(1, 5):
            script.optimizer.zero_grad()
            with script.optimizer.no_sync(), script.net.no_sync() if t % 2 else nullcontext():
                script.backward(t)
            script.backward(t + 10)
            script.optimizer.step()
        answers.append((checksum(script.model), script.optimizer.batch_sizes))
    return answers


def overflow_on_one(rank: int, world: int) -> dict[str, Any]:
    """Rank 1's scale is too large in step 2. It takes part all the same: nobody waits for it."""
    script = Script(rank, settings("weighted", world))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=rank == 1)
    abstained = []
    for t in range(1, 5):
        script.optimizer.zero_grad()
        loss = script.batches.loss(script.net, t)
        scaled = scaler.scale(loss * (torch.inf if (rank, t) == (1, 2) else 1.0))
        scaled.backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(script.optimizer)
        nn.utils.clip_grad_norm_(script.model.parameters(), 1.0)
        scaler.step(script.optimizer)
        scaler.update()
        abstained.append(dict(script.optimizer.report.abstained))
    return {"sum": checksum(script.model), "abstained": abstained, "scale": scaler.get_scale()}


def frozen_on_the_way(rank: int, world: int) -> list[bool]:
    """A layer rests for some steps, and one rank alone has no gradient of it later."""
    script = Script(rank, settings("weighted", world), wrapped="never")
    layer = script.model[4]  # type: ignore[index]
    script.train(2)
    layer.requires_grad_(False)
    before = checksum(layer)
    script.train(2)
    rested = checksum(layer) == before
    layer.requires_grad_(rank != 0)
    script.train(2)
    moved = checksum(layer) != before
    sums: list[Any] = [None] * world
    dist.all_gather_object(sums, checksum(script.model))
    return [rested, moved, len(set(sums)) == 1]


def without_a_batch(rank: int, world: int) -> dict[str, Any]:
    """Rank 1 has no batch in step 2: it calls step() without a gradient, and abstains."""
    script = Script(rank, settings("weighted", world), wrapped="never")
    script.step()
    script.optimizer.zero_grad()
    if rank != 1:
        script.backward(2)
    script.optimizer.step()
    return {"sum": checksum(script.model), "abstained": dict(script.optimizer.report.abstained)}


def drifting(rank: int, world: int) -> str:
    """Rank 1 uses another learning rate."""
    script = Script(rank, settings("majority", world), check_every=2)
    if rank == 1:
        script.config = replace(script.config, step=1e-3)
    with pytest.raises(EngineError) as error:
        script.train(4)
    return str(error.value)


def repeated(rank: int, world: int) -> dict[str, Any]:
    """Rank 1 drifts. The error comes in step(), so DDP is as it was: copy the parameters, repeat the step."""
    script = Script(rank, settings("weighted", world), check_every=2)
    script.step()
    if rank == 1:
        script.model.get_parameter("0.bias").data += 1
    with pytest.raises(EngineError, match="rank 1 has other parameters"):
        script.step()
    odd = copy_from_majority(script.optimizer, script.model)
    script.train(ROUNDS - 1)
    return {"odd": odd, "sum": checksum(script.model), "sizes": script.optimizer.batch_sizes}


def resumed(rank: int, world: int, folder: str) -> list[bool]:
    """A checkpoint of all ranks, in float32 and in bfloat16, whose masters matter."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        run = settings("weighted", world)
        model = fresh(run).to(dtype)
        optimizer = make_optimizer(model, run)
        batches = [torch.randn(4, 20, dtype=dtype) for _ in range(8)]

        def steps(model: nn.Module, optimizer: Vote, chosen: list[Tensor]) -> int:
            for batch in chosen:
                optimizer.zero_grad()
                loss: Tensor = model(batch).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            return zlib.crc32(b"".join(p.detach().float().numpy().tobytes() for p in model.parameters()))

        steps(model, optimizer, batches[:4])
        place = Path(folder, str(dtype))
        save(place, optimizer, {"model": model.state_dict()})
        wanted = steps(model, optimizer, batches[4:])
        again = fresh(run).to(dtype)
        other = make_optimizer(again, run)
        loaded = load(place, other)
        assert loaded is not None
        again.load_state_dict(loaded[0]["model"])
        found.append(steps(again, other, batches[4:]) == wanted)
    return found


def refused(rank: int, world: int) -> list[str]:
    hooked = DistributedDataParallel(nn.Linear(2, 2))
    hooked.register_comm_hook(None, noop_hook)
    attempts: list[Callable[[], object]] = [
        lambda: Vote(hooked.parameters()),
        lambda: Vote(nn.Linear(2, 2).parameters(), timeout=0).poll,
    ]
    said = []
    for attempt in attempts:
        with pytest.raises(ConfigError) as error:
            attempt()
        said.append(str(error.value))
    return said


def differently_made(rank: int, world: int) -> str:
    """Rank 1 has another rule: all raise the same error before a vote is held."""
    run = settings("majority" if rank == 1 else "weighted", world)
    script = Script(rank, run, wrapped="never")
    with pytest.raises(EngineError) as error:
        script.train(1)
    return str(error.value)


def everything(rank: int, world: int, folder: str) -> dict[str, Any]:
    warnings.simplefilter("error")
    works: tuple[Callable[[int, int], Any], ...] = (
        *(by_rules, by_sending, own_gradients, beside_adamw, two_of_them, accumulated, overflow_on_one),
        *(frozen_on_the_way, without_a_batch, drifting, repeated, refused, differently_made),
    )
    found: dict[str, Any] = {work.__name__: work(rank, world) for work in works}
    return found | {"resumed": resumed(rank, world, folder)}


# ---- what they found -----------------------------------------------------------------------------

WORLD = 3


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return together(WORLD, everything, str(folder), folder=folder)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "number"), CASES)
def test_the_simulators_parameters_after_every_round(
    rule: str, number: int, answers: list[dict[str, Any]]
) -> None:
    """DDP made before the optimizer, after it, or never; with overlap and without."""
    wanted = simulated(settings(rule, WORLD))
    assert all(answer["by_rules"][rule, number] == wanted for answer in answers)


def test_feedback_interpolation_and_groups(answers: list[dict[str, Any]]) -> None:
    wanted = [simulated(case) for case in sending(WORLD)]
    assert all(answer["by_sending"] == wanted for answer in answers)


def test_ddps_all_reduce_is_off_and_repr_says_so(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        found = answer["own_gradients"]
        assert found["is_own"]
        assert "DDP's all-reduce is off for these parameters" in found["repr"]
        assert found["sizes"] == (3, 8, 13)


def test_parameters_of_another_optimizer_are_averaged_by_ddp(answers: list[dict[str, Any]]) -> None:
    assert all(answer["beside_adamw"]["is_mean"] for answer in answers)
    assert len({answer["beside_adamw"]["sum"] for answer in answers}) == 1
    assert answers[0]["beside_adamw"]["sizes"] == (3, 8, 13)


def test_two_on_one_model(answers: list[dict[str, Any]]) -> None:
    assert len({answer["two_of_them"] for answer in answers}) == 1


def test_accumulation(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        plain, overlapped = answer["accumulated"]
        assert plain == overlapped == answers[0]["accumulated"][0]
        assert plain[1] == (6, 16, 26)


def test_an_overflow_on_one_rank_is_its_abstention(answers: list[dict[str, Any]]) -> None:
    found = [answer["overflow_on_one"] for answer in answers]
    assert len({each["sum"] for each in found}) == 1
    for each in found:
        assert each["abstained"] == [{}, {1: "non-finite gradient"}, {}, {}]
    assert found[1]["scale"] == 512.0


def test_a_layer_that_rests_and_one_that_a_rank_alone_froze(answers: list[dict[str, Any]]) -> None:
    assert all(answer["frozen_on_the_way"] == [True, True, True] for answer in answers)


def test_a_rank_without_a_batch_abstains(answers: list[dict[str, Any]]) -> None:
    found = [answer["without_a_batch"] for answer in answers]
    assert len({each["sum"] for each in found}) == 1
    assert all(each["abstained"] == {1: "no gradient"} for each in found)


def test_another_learning_rate_is_found(answers: list[dict[str, Any]]) -> None:
    texts = {answer["drifting"] for answer in answers}
    assert len(texts) == 1
    assert "rank 1 has other parameters than the majority, rank 0, 2" in texts.pop()


def test_after_a_drift_the_step_is_repeated(answers: list[dict[str, Any]]) -> None:
    wanted = simulated(settings("weighted", WORLD))[-1]
    for answer in answers:
        assert answer["repeated"] == {"odd": (1,), "sum": wanted, "sizes": (3, 8, 13)}


def test_checkpoints_resume_bit_for_bit(answers: list[dict[str, Any]]) -> None:
    assert all(answer["resumed"] == [True, True] for answer in answers)


def test_what_is_refused(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        hooked, timeout = answer["refused"]
        assert "this DistributedDataParallel has a communication hook" in hooked
        assert "timeout is 0; it must be above 0 seconds" in timeout


def test_ranks_that_differ_all_raise_the_same(answers: list[dict[str, Any]]) -> None:
    texts = {answer["differently_made"] for answer in answers}
    assert len(texts) == 1
    assert "rule" in texts.pop()
