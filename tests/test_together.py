"""Runs with all workers in one pass: the same as one by one, bytes and all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signvote import ConfigError
from signvote.core.ballot import parse
from signvote.core.bits import Zeros, unpack_signs
from signvote.core.encoder import Encoder
from signvote.core.encoding import Encoding
from signvote.core.layout import Layout
from signvote.core.server import Server
from signvote.core.vote import Votes, claims_of
from signvote.kernels import Planes
from signvote.sim import Run, train
from signvote.sim.gradients import Gradients
from signvote.sim.joint.passes import JointPass
from signvote.sim.joint.together import Together
from signvote.sim.machine import Machine
from signvote.sim.setup import Workshop
from signvote.sim.workers import OneByOne
from signvote.tasks import Data, Task
from tests.joint import DEVICES, SIZES, finished, small, small_images
from tests.strategies import RULES_AND_ZEROS

# ---- runs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["paper", "tuned"])
@pytest.mark.parametrize("rule", ["majority", "it-signsgd", "weighted", "robust", "oracle"])
def test_a_run_together_is_the_run_one_by_one(digits: Task, rule: str, recipe: str) -> None:
    """Parameters, accuracy, bytes and trust, with workers away and attacking."""
    options = {"warmup": 3} if rule == "it-signsgd" else {}
    config = small(rule, recipe=recipe, miss=0.2, attack="flip=0.3:1:4", absent=("0:3:5",), options=options)
    one, all_ = (finished(config, digits, Machine(together=way)) for way in (False, True))
    assert (type(one.workers), type(all_.workers)) == (OneByOne, Together)
    assert torch.equal(one.gradients.x, all_.gradients.x)
    a, b = one.result("done"), all_.result("done")
    assert a["evaluations"]["accuracy"] == b["evaluations"]["accuracy"]
    for same in ("bytes_up", "bytes_down", "voters", "trust"):
        assert a[same] == b[same], same


def test_batch_norm_and_augmentation_together(digits: Task) -> None:
    """Close, not equal: batch norm's sums are taken in another order, and near zero a sign may change."""
    config = small(task="cifar10", model=None, batch_sizes=tuple(SIZES), rounds=2, evaluate_every=1)
    one, all_ = (finished(config, small_images(), Machine(together=way)) for way in (False, True))
    assert (one.gradients.x != all_.gradients.x).float().mean() < 0.05
    losses = [run.history["evaluations"]["loss"][0] for run in (one, all_)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("rule", ["majority", "weighted", "it-signsgd"])
@pytest.mark.parametrize("recipe", ["paper", "tuned"])
def test_a_worker_with_a_gradient_that_is_not_finite_takes_no_part(
    digits: Task, rule: str, recipe: str
) -> None:
    """Of its three rounds one is spoilt; momentum, trust and bytes are as if it had abstained in bytes."""
    spoilt = digits.train.inputs.float()
    options = {"warmup": 0} if rule == "it-signsgd" else {}
    config = small(rule, recipe=recipe, rounds=6, batch_sizes=(4, 8, 16), options=options)
    samples = Run(config, digits).workers.work.batch(1, 3)
    spoilt[samples[0]] = torch.inf
    data = Data(inputs=spoilt.flatten(1), labels=digits.train.labels)
    task = Task(name="own", train=data, test=data, model=lambda: nn.Linear(784, 10))
    runs = [finished(config, task, Machine(together=way)) for way in (False, True)]
    assert torch.equal(runs[0].gradients.x, runs[1].gradients.x)
    assert runs[0].gradients.x.isfinite().all()
    results = [run.result("done") for run in runs]
    assert results[0]["bytes_up"] == results[1]["bytes_up"]
    assert results[0]["trust"] == results[1]["trust"]


@pytest.mark.parametrize(("rule", "zeros"), RULES_AND_ZEROS)
def test_a_round_without_a_finite_gradient_moves_nothing(digits: Task, rule: str, zeros: Zeros) -> None:
    """One by one and together: parameters, decay included, bytes and trust."""
    data = Data(inputs=torch.full((64, 784), torch.inf), labels=digits.train.labels[:64])
    task = Task(name="own", train=data, test=data, model=lambda: nn.Linear(784, 10))
    config = small(rule, recipe="tuned", zeros=zeros, rounds=3, batch_sizes=(4, 8, 16), decay=0.5)
    before = Run(config, task).gradients.x.clone()
    runs = [finished(config, task, Machine(together=way)) for way in (False, True)]
    for run in runs:
        assert torch.equal(run.gradients.x, before)
        assert run.server is not None
        assert not run.server.report.is_decided
    results = [run.result("done") for run in runs]
    for same in ("bytes_up", "bytes_down", "trust"):
        assert results[0][same] == results[1][same], same


@pytest.mark.parametrize("rule", ["weighted", "it-signsgd", "oracle"])
@pytest.mark.parametrize("ways", [(True, False), (False, True)])
def test_a_run_goes_on_the_other_way(
    digits: Task, tmp_path: Path, rule: str, ways: tuple[bool, bool]
) -> None:
    config = small(rule, recipe="tuned")
    first, then = (Machine(together=way) for way in ways)
    train(config, digits, tmp_path / "split", machine=first, watch=lambda run: run.round == 7)
    rest = train(config, digits, tmp_path / "split", machine=then, resume=True)
    whole = train(config, digits, tmp_path / "whole")
    assert rest["evaluations"]["accuracy"] == whole["evaluations"]["accuracy"]
    for same in ("bytes_up", "bytes_down", "trust"):
        assert rest[same] == whole[same], same


def pass_of(run: Run) -> JointPass:
    assert isinstance(run.workers, Together)
    return run.workers.joint


def test_the_workshop_serves_the_next_run_of_its_kind(digits: Task) -> None:
    workshop: Workshop = {}
    machine = Machine(together=True)
    runs = [Run(small(seed=seed), digits, machine, workshop) for seed in (0, 1)]
    assert pass_of(runs[0]) is pass_of(runs[1])
    alone = Run(small(seed=1), digits, machine)
    for run in (runs[1], alone):
        for _ in range(3):
            run.step()
    assert torch.equal(runs[1].gradients.x, alone.gradients.x)
    assert pass_of(Run(small(batch_sizes=(4, 4)), digits, machine, workshop)) is not pass_of(runs[1])
    assert len(workshop) == 1


def test_the_true_gradient_is_that_of_all_data(digits: Task) -> None:
    torch.manual_seed(0)
    gradients = Gradients(digits, digits.model())
    truth = gradients.true().clone()
    gradients.model.zero_grad(set_to_none=False)
    everything = torch.arange(len(digits.train))
    digits.loss(gradients.model, digits.batch(digits.train, everything)).backward()  # type: ignore[no-untyped-call]
    assert (truth - gradients.flat).norm() < 1e-4 * truth.norm()


# ---- devices -------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rule", "zeros"), RULES_AND_ZEROS)
def test_the_same_ballots_give_the_same_decision_anywhere(rule: str, zeros: Zeros, device: str) -> None:
    """Bytes on the CPU and planes on a device, one server each: decisions and trust to the bit."""
    layout, n = Layout([("a", (7, 11)), ("b", (90,))]), 167
    options: dict[str, Any] = {"warmup": 2} if rule == "it-signsgd" else {}
    here, there = (Server(layout, rule, run=5, zeros=zeros, **options) for _ in range(2))
    encoding = Encoding(zeros=zeros).suiting(here.rule)
    encoders = [Encoder(layout, m, encoding, run=5, batch_size=m + 1) for m in range(5)]
    for t in range(1, 8):
        voters = [m for m in range(5) if m != t % 5]
        gradients = torch.randn(5, n) * (torch.rand(5, n) < 0.8)
        planes = [encoders[m].encode(t, gradients[m]) for m in voters]
        ballots = {m: encoders[m].ballot(t, p) for m, p in zip(voters, planes, strict=True)}
        message = here.decide(t, ballots)
        claims = claims_of([parse(ballot, layout=layout, run=5) for ballot in ballots.values()])
        known = [p for p in planes if p is not None]
        support = (
            None if zeros == "coin" else torch.stack([p.support for p in known if p.support is not None])
        )
        stacked = Planes(torch.stack([p.signs for p in known]), support).map(lambda p: p.to(device))
        sizes = tuple(m + 1 for m in voters)
        claims = None if claims is None else claims.to(device)
        votes = Votes(workers=tuple(voters), planes=stacked, n=n, batch_sizes=sizes, claims=claims)
        decision = there.decide_planes(t, votes).map(Tensor.cpu)
        ours = parse(message, layout=layout, run=5, round=t).planes()
        assert torch.equal(unpack_signs(ours, n), unpack_signs(decision, n)), t
        assert here.report == there.report
    states = [json.dumps(server.state_dict(), default=lambda x: x.tolist()) for server in (here, there)]
    assert states[0] == states[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("rule", ["weighted", "it-signsgd"])
def test_a_run_on_a_gpu_repeats_and_goes_on_anywhere(digits: Task, tmp_path: Path, rule: str) -> None:
    config, gpu = small(rule), Machine(device="cuda")
    once, again = (train(config, digits, tmp_path / name, machine=gpu) for name in ("once", "again"))
    assert once["evaluations"] == again["evaluations"]
    for name, then in (("gpu", gpu), ("cpu", Machine())):
        train(config, digits, tmp_path / name, machine=gpu, watch=lambda run: run.round == 7)
        rest = train(config, digits, tmp_path / name, machine=then, resume=True)
        assert rest["status"] == "done"
        assert len(rest["machine"]) == (1 if name == "gpu" else 2)
        if name == "gpu":
            assert rest["evaluations"] == once["evaluations"]


# ---- machines ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "tpu"}, "device is 'tpu'; it must be cpu, cuda or cuda:NUMBER"),
        ({"device": "mps"}, "device is 'mps'; it must be cpu, cuda or cuda:NUMBER"),
        ({"device": "cuda:99"}, "device is 'cuda:99'; this PyTorch, .*, "),
        ({"precision": "fp16"}, "there is no precision 'fp16'"),
    ],
)
def test_what_a_machine_refuses(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Machine(**settings)


def test_a_result_says_where_it_was_computed(digits: Task) -> None:
    result = finished(small(rounds=2), digits, Machine()).result("done")
    assert result["machine"] == [{"from_round": 1, "device": "cpu", "precision": "float32"}]


def test_a_machine_leaves_torch_as_it_was() -> None:
    before = torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.cudnn.deterministic
    with Machine(precision="float32").ready():
        assert (torch.get_num_threads(), torch.backends.cudnn.deterministic) == (1, True)
    after = torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.cudnn.deterministic
    assert before == after


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("zeros", ["coin", "abstain"])
@pytest.mark.parametrize(
    "sending", [{"feedback": True}, {"top": 0.1}, {"top": 0.02, "feedback": True}], ids=str
)
def test_top_and_feedback_on_the_gpu(digits: Task, sending: dict[str, Any], zeros: Zeros) -> None:
    """Votes that stay on the device and votes as bytes: the same sizes, and signs that differ only near zero."""
    config = small(zeros=zeros, rounds=4, **sending)
    machines = [Machine(device="cuda", precision="float32", together=way) for way in (False, True)]
    one, all_ = (finished(config, digits, machine) for machine in machines)
    all_.settle()
    assert isinstance(all_.workers, Together)
    assert (one.gradients.x != all_.gradients.x).float().mean() < 0.02
    for mine, its in zip(one.history["bytes_up"], all_.history["bytes_up"], strict=True):
        assert mine == pytest.approx(its, rel=0.01)
