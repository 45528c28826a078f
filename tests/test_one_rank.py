"""The optimizer in a world of one, in this process: sharded by FSDP2, under DDP, and every refusal of one rank.

More ranks are in `test_sharded.py`, `test_sharded_saving.py` and `test_optimizer_ranks.py`, whose cases are used here.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from signvote import ConfigError, Vote
from signvote.engines.ddp import Balancer, copy_from_majority, load_sharded, noop_hook
from signvote.engines.ddp.handshake import SETTINGS
from signvote.engines.ddp.process_group import Alone, ProcessGroup
from signvote.engines.ddp.status import Status, gathered
from signvote.engines.ddp.team import Team
from signvote.errors import EngineError
from tests import optimized
from tests.ranks import alone
from tests.sharded import error_of, flat, mesh_of, plain, sharded, vote_of
from tests.test_optimizer_lazy import are_equal
from tests.test_sharded import MORE, RULES, beside_the_twin
from tests.test_sharded_saving import (
    DAMAGED,
    DTYPES,
    REFUSED,
    check_loaded,
    checkpoint,
    damaged,
    refused,
    resumed,
    train,
)

__all__ = ["alone"]  # a fixture
pytestmark = pytest.mark.usefixtures("alone", "few_objects")
CASES = RULES | MORE


@pytest.fixture
def few_objects() -> Iterator[None]:
    """Every optimizer searches all objects for modules. Those of other tests need no search."""
    gc.freeze()
    yield
    gc.unfreeze()


# ---- sharded -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["weighted", "robust", "abstain", "groups", "bfloat16 with masters"])
def test_a_mesh_of_one_is_no_shards(name: str) -> None:
    """Weights, momentum, masters, trust and reports of a model that nothing shards, bit for bit, after each step."""
    found = beside_the_twin(mesh_of(1, 1), CASES[name])
    assert all(voters == (0,) for voters, _ in found.reports)


def test_without_a_gradient_the_only_node_abstains() -> None:
    optimizer = vote_of(sharded(mesh_of(1, 1)), mesh_of(1, 1))
    optimizer.step()
    assert optimizer.report.abstained == {0: "no gradient"}
    assert optimizer.batch_sizes == (0,)


@pytest.mark.parametrize("dtype", DTYPES)
def test_checkpoints_resume_bit_for_bit_with_shards_and_without(dtype: torch.dtype, tmp_path: Path) -> None:
    mesh = mesh_of(1, 1)
    resumed(mesh, dtype)
    saved, wanted = checkpoint(mesh, tmp_path / "saved", dtype)
    for model in (sharded(mesh, dtype), plain(dtype)):
        optimizer = vote_of(model, mesh, rule="robust")
        train(model, optimizer, range(7, 8))
        check_loaded(tmp_path / "saved", model, optimizer, saved)
        assert torch.equal(train(model, optimizer, range(2, 4)), wanted)


def test_a_new_worker_starts_without_the_momentum_of_others(tmp_path: Path) -> None:
    mesh = mesh_of(1, 1)
    saved, _ = checkpoint(mesh, tmp_path / "saved", torch.float32)
    model = plain()
    optimizer = Vote(model.parameters(), rule="robust", worker_id=4)
    check_loaded(tmp_path / "saved", model, optimizer, saved)


def test_damage_and_other_models_are_refused_in_the_words_of_many_ranks(tmp_path: Path) -> None:
    folder = tmp_path / str(DTYPES[0])
    mesh = mesh_of(1, 1)
    checkpoint(mesh, folder, torch.float32)
    errors = damaged(mesh, folder)
    assert errors.keys() == DAMAGED.keys()
    for name, words in DAMAGED.items():
        assert words in errors[name], name


def test_a_rank_that_dies_while_it_saves_leaves_no_checkpoint(tmp_path: Path) -> None:
    """Its last file is the one that `load_sharded` looks for first."""
    mesh = mesh_of(1, 1)
    model = sharded(mesh)
    optimizer = vote_of(model, mesh, rule="robust")
    with (
        patch("signvote.engines.ddp.sharded.save_file", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        checkpoint(mesh, tmp_path, torch.float32)
    assert list(tmp_path.glob("*.distcp"))
    before = flat(model.parameters()).clone()
    said = error_of(lambda: load_sharded(tmp_path, model, optimizer))
    assert "holds no complete checkpoint: votes.safetensors is missing" in said
    assert torch.equal(flat(model.parameters()), before)


def test_what_sharded_models_refuse_in_the_words_of_many_ranks() -> None:
    errors = refused(mesh_of(1, 1))
    for name in REFUSED.keys() - {"group of a node"}:  # which one rank does not share with another
        assert REFUSED[name] in errors[name], name


def test_copy_from_majority_copies_nothing_and_names_an_unknown_source() -> None:
    mesh = mesh_of(1, 1)
    model = sharded(mesh)
    optimizer = vote_of(model, mesh)
    before = train(model, optimizer, range(2)).clone()
    assert copy_from_majority(optimizer, model) == ()
    assert copy_from_majority(optimizer, model, source=0) == ()
    assert torch.equal(flat(model.parameters()), before)
    with pytest.raises(EngineError, match=r"source is rank 3; it must be one of \[0\]"):
        copy_from_majority(optimizer, model, source=3)


# ---- under DDP -----------------------------------------------------------------------------------


def wrapped(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def unwrapped(model: nn.Module) -> nn.Module:
    return model


WAYS: dict[str, tuple[Callable[[nn.Module], nn.Module], Callable[[nn.Module], nn.Module]]] = {
    "never": (unwrapped, unwrapped),
    "before the optimizers": (wrapped, unwrapped),
    "after them": (unwrapped, wrapped),
}


@pytest.mark.parametrize("optimizers", [1, 2])
def test_beside_adamw_as_without_ddp(optimizers: int) -> None:
    """One `Vote` or two on the first tensors, AdamW on the last two."""
    found = []
    for name, (before, after) in WAYS.items():
        model = optimized.made()
        net = before(model)
        *first, middle, weight, bias = model.parameters()
        parts = [[*first, middle]] if optimizers == 1 else [first, [middle]]
        votes = [Vote(part, lr=3e-3) for part in parts]
        adamw = torch.optim.AdamW([weight, bias])
        net = after(net)
        for t in range(4):
            model.zero_grad()
            optimized.backward(net, t)
            for optimizer in (*votes, adamw):
                optimizer.step()
        assert ("DDP's all-reduce is off" in repr(votes[0])) == (name != "never")
        found.append(optimized.flat(model))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_wrapper_with_a_hook_of_its_own_is_refused() -> None:
    net = DistributedDataParallel(nn.Linear(2, 2))
    net.register_comm_hook(None, noop_hook)
    with pytest.raises(
        ConfigError, match=r"this DistributedDataParallel has a communication hook; Vote needs one without"
    ):
        Vote(net.parameters())


def test_the_batch_size_is_the_balancers_unless_another_is_given() -> None:
    model = optimized.made()
    optimizer = Vote(model.parameters(), balancer=Balancer(16, 1))
    optimized.trained(model, optimizer, range(1))
    assert optimizer.batch_sizes == (16,)
    optimizer.batch_size = 5
    optimized.trained(model, optimizer, range(1, 2))
    assert optimizer.batch_sizes == (5,)


# ---- what travels --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["majority", "weighted", "per tensor", "robust", "abstain"])
def test_what_is_shared_with_nobody_is_what_a_rank_alone_decides(name: str) -> None:
    """Many ranks exchange votes, and pack their decisions and evidence. A rank that is alone does without."""
    found = []
    for is_alone in (True, False):
        with patch.object(Team, "is_alone", is_alone):
            mesh = mesh_of(1, 1)
            model = sharded(mesh)
            optimizer = vote_of(model, mesh, **CASES[name].settings)
            found.append((train(model, optimizer, range(3)), optimizer.report, optimizer.rank_state()))
    (alone, report, state), (shared, its_report, its_state) = found
    assert torch.equal(alone, shared)
    assert report == its_report
    assert are_equal(state, its_state)


# ---- an exchange that fails ----------------------------------------------------------------------


def connected() -> ProcessGroup:
    group = ProcessGroup(None, torch.device("cpu"), 5.0)
    group.connect()
    group.stage = "round 7"
    return group


def fail(group: ProcessGroup) -> None:
    """Rows of two sizes."""
    group.all_to_all(torch.zeros(1, 2), torch.zeros(1, 3))


def test_an_exchange_that_fails_names_the_round_and_blames_nobody() -> None:
    with pytest.raises(EngineError, match="round 7 failed on rank 0: ") as error:
        fail(connected())
    assert "no report from rank" not in str(error.value)


def test_the_store_of_a_dead_process_is_no_second_error() -> None:
    group = connected()

    class Dead:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("Broken pipe")

    group._connected = Dead()  # type: ignore[assignment]
    with pytest.raises(EngineError, match="The store cannot be reached: the process that keeps it is gone"):
        fail(group)


# ---- a second rank that answers as a test says ---------------------------------------------------


class Two(Alone):
    """Two ranks, of which the second sends what the first sends, with some numbers raised by 1."""

    ranks = (0, 1)
    world = 2

    def __init__(self, *raised: int) -> None:
        super().__init__(torch.device("cpu"))
        self._raised = list(raised)

    def all_gather(self, mine: Tensor) -> Tensor:
        other = mine.clone()
        other[self._raised] += 1
        return torch.stack([mine, other])


WORKER, SHARD, LAYOUT, FIRST_SETTING = range(4)  # places in what a rank sends in the handshake
ROUND = FIRST_SETTING + len(SETTINGS)
PARAMETERS = ROUND + 1


def handshake_with(*raised: int) -> list[int]:
    model = optimized.made()
    poll = Vote(model.parameters()).poll
    poll.handshake.run(Team(Two(*raised)), poll.layout, poll.parameters, 1)
    return poll.handshake.ids


def test_two_ranks_that_differ_in_the_worker_id_agree() -> None:
    assert handshake_with(WORKER) == [0, 1]


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        ((WORKER, LAYOUT), "rank 1 differs from rank 0 in the layout of the model"),
        ((WORKER, FIRST_SETTING), "rank 1 differs from rank 0 in the settings: rule"),
        ((WORKER, ROUND), "rank 1 differs from rank 0 in the round"),
        ((WORKER, PARAMETERS), "rank 1 differs from rank 0 in the parameters: start all ranks from one seed"),
        ((), r"worker ids by rank are \[0, 0\]; they must differ"),
        ((WORKER, SHARD), r"the ranks of Vote's group hold different shards, \[0, 1\]; use group="),
    ],
)
def test_each_difference_of_two_ranks_has_its_sentence(raised: tuple[int, ...], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        handshake_with(*raised)


def test_ranks_in_different_rounds() -> None:
    """The handshake finds this first, unless a script calls `step()` on one rank only."""
    poll = Vote(optimized.made().parameters()).poll
    mine = Status(round=4, votes=1, reason=0, batch_size=8, nanoseconds=0, traveled=0, digest=0)
    nothing = torch.zeros(0, dtype=torch.int8)
    found = gathered(mine, [True, False], nothing, poll.exchange, Two(3))
    assert [status.batch_size for status in found.ranks] == [8, 9]
    assert found.used == [True, False]
    with pytest.raises(EngineError, match=r"ranks are in different rounds: \[4, 5\]"):
        gathered(mine, [True, False], nothing, poll.exchange, Two(0))
