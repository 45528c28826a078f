"""The names of torch that it does not export explicitly, or does not document: all in one place.

`tests/test_ddp_alone.py` looks for each of them, and says which one a version of torch lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket as GradBucket  # type: ignore[attr-defined]
from torch.distributed import Store as Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

NAMES = (
    "_foreach_copy_",
    "_foreach_mul_",
    "_foreach_add_",
    "_disable_dynamo",
    "distributed.GradBucket",
    "distributed.Store",
    "distributed.ProcessGroup.get_group_store",
    "distributed.ProcessGroupGloo",
    "distributed.ProcessGroupGloo._Options",
    "distributed.ProcessGroupGloo.abort",
    "autograd.Variable._execution_engine.queue_callback",
)


def store_of(group: dist.ProcessGroup) -> Store:
    """The store by which the ranks of a group found each other; in an old torch that of all ranks."""
    if not hasattr(group, "get_group_store"):
        return dist.distributed_c10d._get_default_store()
    return group.get_group_store()


def after_backward(act: Callable[[], None]) -> None:
    """For a hook of DDP: call a function when the backward pass ends, after DDP has written the gradients."""
    engine = torch.autograd.Variable._execution_engine

    def later() -> None:
        engine.queue_callback(act)

    engine.queue_callback(later)  # DDP's own callback is queued between the two


def not_compiled(step: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Run a function as it is where a compiled one calls it: torch.compile cannot follow an exchange between ranks.

    torch.compiler.disable would import the compiler at once; this imports it when the function is first called, which
    torch's own optimizers do before.
    """
    return torch._disable_dynamo(step)  # type: ignore[attr-defined]


def copy_all_(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target, on a GPU in few launches."""
    if targets:
        torch._foreach_copy_(targets, sources)


OTHERWISE = -1  # a tensor is placed neither as a copy nor as a shard


def sharding_of(tensor: Tensor) -> tuple[DeviceMesh, tuple[int | None, ...]] | None:
    """The mesh of a DTensor, and the dimension that each of the mesh's dimensions cuts; None for a plain tensor.

    A dimension of the mesh that holds copies cuts None.
    """
    if type(tensor).__name__ != "DTensor" and type(getattr(tensor, "data", None)).__name__ != "DTensor":
        return None
    from torch.distributed.tensor import DTensor, Replicate, Shard

    assert isinstance(tensor, DTensor)
    cut: list[int | None] = []
    for place in tensor.placements:
        otherwise = None if type(place) is Replicate else OTHERWISE
        cut.append(place.dim if type(place) is Shard else otherwise)
    return tensor.device_mesh, tuple(cut)


def is_sharded_by_fsdp(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on this module."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def local_of(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    to_local = getattr(tensor, "to_local", None)
    local: Tensor = tensor if to_local is None else to_local()
    return local


def like_shard(parameter: Tensor, flat: Tensor) -> Tensor:
    """A flat vector as the part of a parameter that this rank holds: in its shape, a DTensor if that is one."""
    local = flat.view(local_of(parameter).shape)
    sharding = sharding_of(parameter)
    if sharding is None:
        return local
    from torch.distributed.tensor import DTensor, Shard

    mesh, _ = sharding
    whole: Tensor = DTensor.from_local(
        local,
        mesh,
        [Shard(0)],
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return whole
