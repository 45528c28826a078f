"""Sharded models: states and checkpoints, ranks that drift apart, and everything that is refused, in its words."""

from __future__ import annotations

import gc
import io
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from signvote import Vote
from signvote.checkpoint import State
from signvote.engines.ddp import Balancer, copy_from_majority, load, load_sharded, save, save_sharded
from signvote.engines.ddp.torch_names import local_of
from tests.ranks import together
from tests.sharded import (
    Array,
    backward,
    error_of,
    flat,
    loss,
    mesh_of,
    plain,
    same,
    sharded,
    spoil_one_shard,
    trust_of,
    vote_of,
)

PAGE = Path(__file__).parent.parent / "docs" / "fsdp.md"
DTYPES = (torch.float32, torch.bfloat16)


def train(model: nn.Module, optimizer: Vote, rounds: range) -> Tensor:
    for t in rounds:
        backward(model, t)
        optimizer.step()
    return flat(model.parameters())


def momentum_of(optimizer: Vote) -> Tensor:
    return flat(state["momentum_buffer"] for _, state in optimizer.named_state())


# ---- states --------------------------------------------------------------------------------------


def resumed(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """From state dicts in a file of each rank, into an optimizer that has not stepped and into one that has."""
    model = sharded(mesh, dtype)
    optimizer = vote_of(model, mesh, rule="robust")
    train(model, optimizer, range(2))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    wanted = train(model, optimizer, range(2, 4))
    for rounds in (0, 1):
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        other = sharded(mesh, dtype)
        its = vote_of(other, mesh, rule="robust")
        train(other, its, range(7, 7 + rounds))
        other.load_state_dict(saved["model"])
        its.load_state_dict(saved["optimizer"])
        assert torch.equal(train(other, its, range(2, 4)), wanted), (dtype, rounds)
        assert same(trust_of(its), trust_of(optimizer))


def scaled(mesh: DeviceMesh) -> tuple[float, Array]:
    """GradScaler, with an overflow in one shard of the last node."""
    model = sharded(mesh)
    optimizer = vote_of(model, mesh)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for t in range(2):
        model.zero_grad()
        scaler.scale(loss(model, dist.get_rank(), t)).backward()  # type: ignore[no-untyped-call]
        if t == 1:
            spoil_one_shard(model, 2)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), flat(model.parameters()).numpy()


def drifted(mesh: DeviceMesh) -> str:
    """One rank changes its shard: all ranks raise the same error, and go on from the first node."""
    model = sharded(mesh)
    optimizer = vote_of(model, mesh)
    before = train(model, optimizer, range(1)).clone()
    if dist.get_rank() == 3:
        with torch.no_grad():
            local_of(model.first.weight).add_(1)
    backward(model, 1)
    found = error_of(optimizer.step)
    assert error_of(lambda: save_sharded("nowhere", model, optimizer)) == found.replace(
        "round 2", "the checkpoint of round 1"
    )
    first = dist.get_process_group_ranks(mesh["replicate"].get_group())[0]
    copy_from_majority(optimizer, model, source=first)
    assert torch.equal(flat(model.parameters()), before)
    optimizer.step()
    assert optimizer.round == 2
    return found


# ---- checkpoints ---------------------------------------------------------------------------------


class Saved(NamedTuple):
    """What a checkpoint must bring back."""

    weights: Tensor
    momentum: list[Tensor]  # by worker
    trust: State


def checkpoint(mesh: DeviceMesh, folder: Path, dtype: torch.dtype) -> tuple[Saved, Tensor]:
    """Write one after two rounds; the weights two rounds later."""
    model = sharded(mesh, dtype)
    optimizer = vote_of(model, mesh, rule="robust")
    train(model, optimizer, range(2))
    save_sharded(folder, model, optimizer)
    mine = momentum_of(optimizer)
    by_worker = [torch.empty_like(mine) for _ in range(mesh.shape[0])]
    dist.all_gather(by_worker, mine, group=mesh["replicate"].get_group())
    saved = Saved(flat(model.parameters()), by_worker, trust_of(optimizer))
    return saved, train(model, optimizer, range(2, 4))


def check_loaded(folder: Path, model: nn.Module, optimizer: Vote, saved: Saved) -> None:
    load_sharded(folder, model, optimizer)
    assert optimizer.round == 2
    assert torch.equal(flat(model.parameters()), saved.weights)
    assert same(trust_of(optimizer), saved.trust)
    wanted = torch.zeros_like(saved.momentum[0])
    if optimizer.worker_id < len(saved.momentum):
        wanted = saved.momentum[optimizer.worker_id]
    assert torch.equal(momentum_of(optimizer), wanted)


def loaded_everywhere(folder: Path, dtype: torch.dtype) -> Array:
    mesh = mesh_of(2, 2)
    saved, wanted = checkpoint(mesh, folder, dtype)
    model = sharded(mesh, dtype)
    optimizer = vote_of(model, mesh, rule="robust")
    train(model, optimizer, range(5, 6))
    check_loaded(folder, model, optimizer, saved)
    assert torch.equal(train(model, optimizer, range(2, 4)), wanted)
    for shape in ((1, 4), (4, 1)):
        other_mesh = mesh_of(*shape)
        model = sharded(other_mesh, dtype)
        optimizer = vote_of(model, other_mesh, rule="robust")
        check_loaded(folder, model, optimizer, saved)
        train(model, optimizer, range(2, 4))
    whole_model = plain(dtype)
    optimizer = Vote(whole_model.parameters(), lr=1e-2, rule="robust")
    check_loaded(folder, whole_model, optimizer, saved)
    return train(whole_model, optimizer, range(2, 4)).numpy()


def damaged(mesh: DeviceMesh, folder: Path) -> dict[str, str]:
    """The errors of checkpoints that are damaged, and of other models and settings."""
    part = f"__{mesh.size() - 1}_0.distcp"

    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-200])

    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    acts: dict[str, Callable[[Path], object]] = {
        "no metadata": lambda its: (its / ".metadata").unlink(),
        "metadata": lambda its: (its / ".metadata").write_bytes(b"damaged"),
        "no votes": lambda its: (its / "votes.safetensors").unlink(),
        "votes": lambda its: cut(its / "votes.safetensors"),
        "no part": lambda its: (its / part).unlink(),
        "part": lambda its: cut(its / part),
        "a bit": lambda its: flip(its / part),
    }
    if dist.get_rank() == 0:
        for name, act in acts.items():
            shutil.copytree(folder, folder.parent / name)
            act(folder.parent / name)
    dist.barrier()
    model = sharded(mesh)
    optimizer = vote_of(model, mesh, rule="robust")
    before = flat(model.parameters()).clone()
    found = {name: error_of(lambda: load_sharded(folder.parent / name, model, optimizer)) for name in acts}  # noqa: B023
    found["again"] = error_of(lambda: save_sharded(folder, model, optimizer))
    found["a file"] = error_of(lambda: save_sharded(folder / "votes.safetensors", model, optimizer))
    with patch("signvote.engines.ddp.sharded.save_file", side_effect=OSError("disk full")):
        found["disk full"] = error_of(lambda: save_sharded(folder.parent / "full", model, optimizer))
    assert torch.equal(flat(model.parameters()), before)
    with patch("torch.distributed.checkpoint.FileSystemReader.read_data", side_effect=OSError("gone")):
        found["unreadable"] = error_of(lambda: load_sharded(folder, sharded(mesh), optimizer))
    by_majority = vote_of(model, mesh, rule="majority")
    found["rule"] = error_of(lambda: load_sharded(folder, model, by_majority))
    small: nn.Module = nn.Linear(5, 9)
    fully_shard(small, mesh=mesh["shard"])
    found["model"] = error_of(lambda: load_sharded(folder, small, vote_of(small, mesh)))
    wider = sharded(mesh)
    wider.first = nn.Linear(5, 8)
    fully_shard(wider.first, mesh=mesh["shard"])
    found["shape"] = error_of(lambda: load_sharded(folder, wider, vote_of(wider, mesh)))
    found["save"] = error_of(lambda: save(folder, optimizer, {}))
    found["load"] = error_of(lambda: load(folder, optimizer))
    state = optimizer.state_dict()
    shard, shards = state["shard"]
    state["shard"] = [1 - shard, shards]
    found["state"] = error_of(lambda: optimizer.load_state_dict(state))
    shown = (("FOLDER", str(folder.parent)), ("PART", part))
    return {name: replaced(text, shown) for name, text in found.items()}


def replaced(text: str, names: Iterable[tuple[str, str]]) -> str:
    """A text with names in the place of what differs between runs."""
    for name, what in names:
        text = text.replace(what, name)
    return text


# ---- refused -------------------------------------------------------------------------------------


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def with_fsdp(mesh: DeviceMesh, **more: Any) -> nn.Module:
    model = two_layers()
    fully_shard(model, mesh=mesh, **more)
    return model


def across(mesh: DeviceMesh) -> str:
    """Groups that mix the shards."""
    groups = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    mine = groups[dist.get_rank() in (1, 2)]
    model = sharded(mesh)
    optimizer = Vote(model.parameters(), group=mine)
    return error_of(lambda: train(model, optimizer, range(1)))


def refused(mesh: DeviceMesh) -> dict[str, str]:
    """Every one before the first collective: no rank waits for another."""
    shard = mesh["shard"]
    half, mixed = two_layers(), two_layers()
    for one in (half, mixed):
        fully_shard(one[0], mesh=shard)
    fully_shard(mixed[1], mesh=mesh["replicate"])
    columns = parallelize_module(two_layers(), shard, {"0": ColwiseParallel(), "1": ColwiseParallel()})
    rows = parallelize_module(two_layers(), shard, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    both = parallelize_module(two_layers(), shard, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(both, mesh=mesh["replicate"])
    usual = with_fsdp(shard)
    models: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "hybrid": (with_fsdp(mesh), {}),
        "columns": (columns, {}),
        "rows": (rows, {}),
        "fsdp and tensor parallel": (both, {}),
        "placement": (with_fsdp(shard, shard_placement_fn=lambda p: Shard(p.ndim - 1)), {}),
        "half": (half, {}),
        "meshes": (mixed, {}),
        "overlap": (usual, {"overlap": True}),
        "balancer": (usual, {"balancer": Balancer(16, 2)}),
        "feedback": (usual, {"feedback": True}),
        "polar": (usual, {"polar": True}),
        "top": (usual, {"top": 0.1}),
        "it-signsgd": (usual, {"rule": "it-signsgd"}),
        "no group": (usual, {"group": None}),
        "group of a node": (usual, {"group": shard.get_group()}),
    }
    found = {}
    for name, (model, more) in models.items():
        settings = {"group": mesh["replicate"].get_group(), **more}
        found[name] = error_of(lambda: Vote(model.parameters(), **settings).poll)  # noqa: B023
    late = two_layers()
    early = Vote(late.parameters())
    fully_shard(late, mesh=shard)
    found["too early"] = error_of(lambda: early.poll)
    return found


ALONE = 'tensor parallelism and shard_placement_fn are not supported; use only fully_shard(model, mesh=mesh["shard"])'
GROUP = 'group=mesh["replicate"].get_group()'
REFUSED = {
    "hybrid": "0 lies on a mesh of two dimensions, over which FSDP2 averages gradients and leaves nothing to vote on;"
    f' use fully_shard(model, mesh=mesh["shard"]) and Vote(..., {GROUP})',
    "columns": ALONE,
    "rows": ALONE,
    "fsdp and tensor parallel": ALONE,
    "placement": ALONE,
    "half": "2 is not sharded, and others are: call fully_shard on the whole model, or give 2 to another optimizer",
    "meshes": "2 lies on another mesh than the first parameter; one mesh is supported",
    "overlap": "overlap=True is not supported with sharded parameters; use overlap=False",
    "balancer": "a balancer plans for workers of one rank, and the parameters are sharded; leave it out",
    "feedback": "feedback, top and polar need the whole vector, and the parameters are sharded",
    "polar": "feedback, top and polar need the whole vector, and the parameters are sharded",
    "top": "feedback, top and polar need the whole vector, and the parameters are sharded",
    "too early": "fully_shard has replaced the model's parameters; make Vote after fully_shard",
    "it-signsgd": "rule 'it-signsgd' keeps counters per coordinate, which is not supported with sharded parameters",
    "no group": f"give Vote the ranks that hold the same shards on other machines: {GROUP}",
    "group of a node": f"give Vote the ranks that hold the same shards on other machines: {GROUP}",
}
DAMAGED = {
    "no metadata": "StateError: FOLDER/no metadata holds no complete checkpoint: .metadata is missing",
    "metadata": "StateError: FOLDER/metadata/.metadata is missing, cut short or damaged",
    "no votes": "StateError: FOLDER/no votes holds no complete checkpoint: votes.safetensors is missing",
    "votes": "StateError: FOLDER/votes/votes.safetensors is damaged",
    "no part": "StateError: FOLDER/no part/PART is missing, cut short or damaged",
    "part": "StateError: FOLDER/part/PART is missing, cut short or damaged",
    "a bit": "StateError: FOLDER/a bit/PART is missing, cut short or damaged",
    "again": "StateError: FOLDER/torch.float32 holds a checkpoint already; give each checkpoint a new folder",
    "a file": "StateError: FOLDER/torch.float32/votes.safetensors could not be written: rank 0 failed with",
    "unreadable": "StateError: FOLDER/torch.float32 could not be read: rank 0 failed with OSError: gone",
    "disk full": "StateError: the first rank could not write FOLDER/full/votes.safetensors",
    "rule": "StateError: state of rule 'robust' cannot be loaded into rule 'majority'",
    "model": "StateError: FOLDER/torch.float32 is of another model: it does not hold weight",
    "shape": "StateError: FOLDER/torch.float32 is of another model: first.weight has shape (9, 5), and this model's"
    " has (8, 5)",
    "save": "ConfigError: the parameters are sharded; use save_sharded and load_sharded",
    "load": "ConfigError: the parameters are sharded; use save_sharded and load_sharded",
    "state": "; to load in another mesh, use save_sharded and load_sharded",
}


# ---- tests ---------------------------------------------------------------------------------------


Restored = tuple[list[Array], dict[str, str]]


def restored(rank: int, world: int, folder: Path) -> Restored:
    gc.freeze()  # every optimizer searches all objects for modules, and there are none yet
    mesh = mesh_of(2, 2)
    for dtype in DTYPES:
        resumed(mesh, dtype)
    loaded = [loaded_everywhere(folder / str(dtype), dtype) for dtype in DTYPES]
    return loaded, damaged(mesh, folder / str(DTYPES[0]))


def test_states_and_checkpoints_resume_bit_for_bit_or_are_refused(tmp_path: Path) -> None:
    """The ranks compare what is theirs. After a load in another mesh they still train one model."""
    answers: list[Restored] = together(4, restored, tmp_path, folder=tmp_path)
    for loaded, errors in answers:
        for first, its in zip(answers[0][0], loaded, strict=True):
            assert (first == its).all()
        assert errors.keys() == DAMAGED.keys()
        for name, words in DAMAGED.items():
            assert words in errors[name], name


class Found(NamedTuple):
    """What a rank found."""

    scaled: tuple[float, Array]
    drift: str
    across: str
    refused: dict[str, str]


def everything_else(rank: int, world: int) -> Found:
    gc.freeze()
    mesh = mesh_of(2, 2)
    return Found(scaled(mesh), drifted(mesh), across(mesh), refused(mesh))


def test_overflows_drift_and_what_is_refused(tmp_path: Path) -> None:
    answers: list[Found] = together(4, everything_else, folder=tmp_path)
    assert [found.scaled[0] for found in answers] == [4.0, 4.0, 2.0, 2.0], "a node has one scale"
    drift = "EngineError: round 2: ranks have different parameters, and no majority has the same: 1 | 3"
    for found in answers:
        assert (found.scaled[1] == answers[0].scaled[1]).all()
        assert found.drift.startswith(drift)
        assert "EngineError: the ranks of Vote's group hold different shards, [" in found.across
        assert found.refused.keys() == REFUSED.keys()
        for name, words in REFUSED.items():
            assert found.refused[name].startswith("ConfigError: ")
            assert words in found.refused[name], name
            shown = re.sub(r"\b[02]\b", "NAME", found.refused[name].removeprefix("ConfigError: "))
            assert f"| {shown} |" in PAGE.read_text(), name
