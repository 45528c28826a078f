"""FSDP2 inside a node, votes between nodes: the law is that a node of many ranks is one worker.

Every case trains twice in the same processes: sharded, and by a twin that holds the whole model and gets the gradients
that its node computed. After every step both must be equal bit for bit: weights, batch sizes, trust and reports.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from signvote import Server, Vote, Worker
from tests.ranks import together
from tests.sharded import (
    Array,
    backward,
    flat,
    gradients,
    loss,
    mesh_of,
    plain,
    same,
    samples,
    sharded,
    spoil_one_shard,
    trust_of,
    vote_of,
)

ROUNDS = 4
MESHES = {4: [(2, 2)], 8: [(4, 2), (2, 4)]}  # by processes: (replicas, shards)


# ---- cases ---------------------------------------------------------------------------------------


def usual(model: nn.Module, t: int) -> None:
    """The layer that is seldom used is used by the second node, in even rounds."""
    backward(model, t, rarely=replica(model) == 1 and t % 2 == 0)


def with_nan(model: nn.Module, t: int) -> None:
    """In round 2 one shard of the last node has a number that is none."""
    usual(model, t)
    if t == 2:
        spoil_one_shard(model, dist.get_world_size() - 2)


def without_gradient(model: nn.Module, t: int) -> None:
    """In round 2 the first node has no gradient."""
    if t == 2 and replica(model) == 0:
        model.zero_grad()
    else:
        usual(model, t)


def clipped(model: nn.Module, t: int) -> None:
    usual(model, t)
    found = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    norm = found.full_tensor() if hasattr(found, "full_tensor") else found
    assert norm > 0.1
    now = flat(p.grad for p in model.parameters() if p.grad is not None).norm()
    torch.testing.assert_close(now, torch.tensor(0.1), rtol=1e-3, atol=0.0)


def accumulated(model: nn.Module, t: int) -> None:
    """Two backward passes, of which the second exchanges gradients."""
    usual(model, t)
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    usual(model, t + 10)
    model.set_requires_gradient_sync(True)  # type: ignore[operator]
    loss(model, dist.get_rank(), t + 20).backward()  # type: ignore[no-untyped-call]


def replica(model: nn.Module) -> int:
    """The node of this rank."""
    parameter: Any = next(model.parameters())
    return dist.get_rank() // int(parameter.device_mesh.size())


class Case(NamedTuple):
    """What is trained, and how."""

    settings: dict[str, Any]
    compute: Callable[[nn.Module, int], None] = usual
    dtype: torch.dtype = torch.float32
    keep: bool = False  # the whole parameters between forward and backward
    mixed: bool = False  # compute in bfloat16
    split: bool = False  # two groups of parameters


RULES: dict[str, Case] = {
    "majority": Case({"rule": "majority"}),
    "weighted": Case({"rule": "weighted", "weight_decay": 0.5}),
    "robust": Case({"rule": "robust", "sample": 100}),
}
MORE: dict[str, Case] = {
    "abstain": Case({"rule": "robust", "zeros": "abstain", "momentum": 0.0}),
    "per tensor": Case({"rule": "weighted", "per": "tensor"}, keep=True),
    "nan in one shard": Case({"rule": "weighted"}, with_nan),
    "a node without a gradient": Case({"rule": "robust"}, without_gradient),
    "below the quorum": Case({"rule": "weighted", "min_voters": 2}, with_nan),
    "clipped": Case({"rule": "weighted"}, clipped),
    "accumulated": Case({"rule": "weighted"}, accumulated),
    "groups": Case({"rule": "weighted"}, split=True),
    "bfloat16 with masters": Case({"rule": "weighted", "weight_decay": 0.5}, dtype=torch.bfloat16),
    "mixed precision": Case({"rule": "weighted"}, mixed=True),
    "one chunk": Case({"rule": "robust", "chunk": 2**20}),
}


# ---- the twin ------------------------------------------------------------------------------------


def optimizer_of(model: nn.Module, mesh: DeviceMesh, case: Case) -> Vote:
    optimizer = vote_of(model, mesh, **case.settings)
    if case.split:
        first, *others = optimizer.param_groups[0]["params"]
        optimizer.param_groups[0]["params"] = others
        optimizer.add_param_group({"params": [first], "lr": 3e-2, "momentum": 0.3, "weight_decay": 0.7})
    return optimizer


def samples_of_node(mesh: DeviceMesh) -> int:
    ranks = dist.get_process_group_ranks(mesh["shard"].get_group())
    return sum(samples(rank) for rank in ranks)


class Found(NamedTuple):
    """What a rank found in a case."""

    weights: Array
    gradients: list[list[Array | None]]  # of its node, by round
    reports: list[Any]


def beside_the_twin(mesh: DeviceMesh, case: Case) -> Found:
    model, whole_model = sharded(mesh, case.dtype, keep=case.keep, mixed=case.mixed), plain(case.dtype)
    optimizer, twin = optimizer_of(model, mesh, case), optimizer_of(whole_model, mesh, case)
    computed: list[list[Array | None]] = []
    reports = []
    passes = 3 if case.compute is accumulated else 1
    for t in range(ROUNDS):
        case.compute(model, t)
        wanted = gradients(model)
        optimizer.step()
        for parameter, gradient in zip(whole_model.parameters(), wanted, strict=True):
            parameter.grad = gradient
        twin.step(batch_size=passes * samples_of_node(mesh) if any(g is not None for g in wanted) else 0)
        computed.append([None if g is None else g.float().numpy() for g in wanted])
        reports.append((optimizer.report.voters, dict(optimizer.report.abstained)))
        assert torch.equal(flat(model.parameters()), flat(whole_model.parameters())), t
        assert optimizer.batch_sizes == twin.batch_sizes
        assert optimizer.report == twin.report
        assert same(trust_of(optimizer), trust_of(twin))
    momentum = {name: state["momentum_buffer"] for name, state in twin.named_state() if state}
    for name, state in optimizer.named_state():
        for kept, its_twin in zip(state.values(), dict(twin.named_state())[name].values(), strict=True):
            assert torch.equal(flat([kept]), flat([its_twin])), name
    assert bool(momentum) == (case.settings.get("momentum") != 0.0)
    return Found(flat(model.parameters()).numpy(), computed, reports)


Answers = dict[tuple[tuple[int, int], str], Found]


def all_cases(rank: int, world: int) -> Answers:
    found = {}
    for shape in MESHES[world]:
        mesh = mesh_of(*shape)
        for name, case in {**RULES, **(MORE if world == 4 else {})}.items():
            try:
                found[shape, name] = beside_the_twin(mesh, case)
            except Exception as error:
                error.add_note(f"case {name!r} on mesh {shape}")
                raise
    return found


def by_workers(case: Case, shape: tuple[int, int], answers: list[Answers], name: str) -> Tensor:
    """The same by `Worker` and `Server`, on the gradients of the nodes."""
    model = plain()
    parameters = {str(i): p for i, p in enumerate(model.parameters()) if p.requires_grad}
    replicas, shards = shape
    options = dict(case.settings)
    rule, zeros = options.pop("rule"), options.pop("zeros", "coin")
    decay, momentum = options.pop("weight_decay", 0.0), options.pop("momentum", 0.9)
    workers = [
        Worker(parameters, node, momentum=momentum, zeros=zeros, decay=decay) for node in range(replicas)
    ]
    server = Server(workers[0].layout, rule, zeros=zeros, **options)
    for t in range(ROUNDS):
        ballots = {}
        used = set()
        for node, worker in enumerate(workers):
            its = answers[node * shards][shape, name].gradients[t]
            for parameter, gradient in zip(model.parameters(), its, strict=True):
                parameter.grad = None if gradient is None else torch.from_numpy(gradient)
            used |= {i for i, gradient in enumerate(its) if gradient is not None}
            worker.batch_size = sum(samples(rank) for rank in range(node * shards, (node + 1) * shards))
            ballots[node] = worker.ballot(t + 1)
        before = [p.detach().clone() for p in model.parameters()]
        workers[0].apply(server.decide(t + 1, ballots), 1e-2)
        with torch.no_grad():  # nobody used these
            for i, parameter in enumerate(model.parameters()):
                if i not in used:
                    parameter.copy_(before[i])
    return flat(model.parameters())


# ---- laws ----------------------------------------------------------------------------------------


def test_two_nodes_of_two_ranks_are_two_workers(tmp_path: Path) -> None:
    """One test, so that the ranks start once."""
    answers = together(4, all_cases, folder=tmp_path)
    check_equal_to_workers(answers)
    check_the_same_on_every_rank(answers)
    check_a_nan_in_one_shard_is_an_abstention_of_the_node(answers)
    check_a_node_without_a_gradient_abstains(answers)
    check_gradients_are_the_mean_of_the_node(answers)


def test_eight_ranks_are_four_workers_or_two(tmp_path: Path) -> None:
    answers = together(8, all_cases, folder=tmp_path)
    check_equal_to_workers(answers)
    check_the_same_on_every_rank(answers)


def check_equal_to_workers(answers: list[Answers]) -> None:
    for shape in MESHES[len(answers)]:
        for name, case in RULES.items():
            found = torch.from_numpy(answers[0][shape, name].weights)
            assert torch.equal(found, by_workers(case, shape, answers, name)), (shape, name)


def check_the_same_on_every_rank(answers: list[Answers]) -> None:
    for case, found in answers[0].items():
        for other in answers[1:]:
            assert (other[case].weights == found.weights).all(), case
            assert other[case].reports == found.reports, case


def check_a_nan_in_one_shard_is_an_abstention_of_the_node(answers: list[Answers]) -> None:
    for found in answers:
        reports = found[(2, 2), "nan in one shard"].reports
        assert reports[1] == ((0, 1), {})
        assert reports[2] == ((0,), {1: "non-finite gradient"})
        assert reports[3] == ((0, 1), {})
    assert answers[0][(2, 2), "below the quorum"].reports[2][0] == ()


def check_a_node_without_a_gradient_abstains(answers: list[Answers]) -> None:
    reports = answers[3][(2, 2), "a node without a gradient"].reports
    assert reports[2] == ((1,), {0: "no gradient"})


def check_gradients_are_the_mean_of_the_node(answers: list[Answers]) -> None:
    """The twins got what FSDP2 promises: the mean over the ranks of a node."""
    lengths = []
    for node in range(2):
        model = plain()
        for rank in (2 * node, 2 * node + 1):
            (loss(model, rank, 0, rarely=node == 1) / 2).backward()  # type: ignore[no-untyped-call]
        mean = flat(p.grad for p in model.parameters() if p.grad is not None)
        its = answers[2 * node][(2, 2), "majority"].gradients[0]
        found = torch.cat([torch.from_numpy(g).reshape(-1) for g in its if g is not None])
        torch.testing.assert_close(found, mean)
        lengths.append(len(mean))
    assert lengths[0] < lengths[1]  # the layer that is seldom used
