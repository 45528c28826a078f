"""The state of the optimizer: PyTorch's entries, and two of its own.

state["state"][i]["momentum_buffer"]    this worker's momentum, in the shape of parameter i
state["state"][i]["master"]             the float32 master of a parameter of 16 bits
state["votes"]                          the trust in all workers; None before the first step
state["shard"]                          which shard of its worker this rank has: [0, 1] is the whole
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, MutableMapping, Sequence

from torch import Tensor

from signvote.core.trust import State
from signvote.engines.ddp.torch_names import like_shard, local_of
from signvote.engines.ddp.voted import Votes
from signvote.errors import StateError

MOMENTUM = "momentum_buffer"
MASTER = "master"
VOTES = "votes"
SHARD = "shard"
WHOLE = [0, 1]


def show_state(votes: Votes, state: MutableMapping[Tensor, dict[str, Tensor]]) -> None:
    """Put momentum and masters into an optimizer's state: views, not copies. They stay while momentum has its place."""
    momenta = votes.momenta()
    if momenta:
        last, its_momentum = momenta[-1]
        if state[last].get(MOMENTUM) is its_momentum:
            return
    for parameter, momentum in momenta:
        state[parameter][MOMENTUM] = momentum
    for place, master in votes.stepping.masters.items():
        parameter = votes.parameters[place]
        state[parameter][MASTER] = like_shard(parameter, master.view(-1))


def with_votes(usual: State, votes: Votes) -> State:
    """The state that PyTorch makes, copied, and the entries of votes."""
    poll = votes.poll.state_dict()
    del poll["average"]  # it is in the state of each parameter
    copied = {place: _copied(entries) for place, entries in usual["state"].items()}
    return usual | {
        "state": copied,
        VOTES: poll,
        SHARD: _shard_of(votes),
    }


def without_votes(state_dict: State) -> State:
    """The entries that PyTorch knows."""
    return {name: value for name, value in state_dict.items() if name not in (VOTES, SHARD)}


def by_parameter(state_dict: State, parameters: Sequence[Tensor]) -> dict[int, State]:
    """The state of each parameter, by its id, as it was saved: PyTorch would turn all of it to the parameter's type."""
    if VOTES not in state_dict:
        raise StateError("the state has no entry 'votes': another optimizer wrote it, not Vote")
    places = [place for group in state_dict["param_groups"] for place in group["params"]]
    if len(places) != len(parameters):
        raise StateError(f"the state is of {len(places)} parameters, and the optimizer has {len(parameters)}")
    states = state_dict["state"]
    found = {}
    for parameter, place in zip(parameters, places, strict=True):
        if place in states:
            found[id(parameter)] = states[place]
    return found


def is_own(votes: Votes, state_dict: State) -> bool:
    """Whether this worker wrote the state; a warning if not."""
    worker = state_dict[VOTES]["worker"]
    own = votes.poll.worker_id
    if worker != own:
        warnings.warn(
            f"the state is of worker {worker}, so worker {own} starts without momentum; to resume exactly, also"
            " call signvote.engines.ddp.save and load on every rank",
            stacklevel=3,
        )
    return bool(worker == own)


def load_poll(votes: Votes, state_dict: State) -> None:
    """Load round and trust. The state of another shard is refused, and nothing changes."""
    found = list(state_dict.get(SHARD, WHOLE))
    wanted = _shard_of(votes)
    if found != wanted:
        raise StateError(
            f"the state is of shard {_named(found)}, and this rank has shard {_named(wanted)}; to load in another"
            " mesh, use save_sharded and load_sharded"
        )
    votes.poll.load_state_dict({**state_dict[VOTES], "average": None})


def load_tensors(votes: Votes, saved: Mapping[int, State], *, is_own: bool) -> None:
    """Load masters, and the worker's own momentum.

    Args:
        votes: to load into.
        saved: the state of each parameter, by its id.
        is_own: whether this worker wrote it.

    """
    for place, parameter in enumerate(votes.parameters):
        its_state = saved.get(id(parameter), {})
        votes.stepping.load_master(place, its_state.get(MASTER))
    for parameter, momentum in votes.momenta():
        its_state = saved.get(id(parameter), {})
        if is_own and MOMENTUM in its_state:
            local_of(momentum).copy_(local_of(its_state[MOMENTUM]))


def _shard_of(votes: Votes) -> list[int]:
    shards = votes.poll.team.shards
    return WHOLE if shards is None else [shards.rank, shards.world]


def _named(shard: list[int]) -> str:
    place, count = shard
    return f"{place} of {count}"


def _copied(entries: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in entries.items()}
