"""Ranks that drift apart are noticed and can be brought back together; a round without votes moves nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from signvote import ConfigError
from signvote.engines.ddp import VoteState, copy_from_majority, load, save, vote_gradients, vote_hook
from signvote.engines.ddp.drift import SLICE, check, digest, majority
from signvote.errors import EngineError
from tests.ranks import Trainer, alone, checksum, config, together

__all__ = ["alone"]  # a fixture

# ---- the digest ----------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
    where=st.integers(0, 10**6),
    bit=st.integers(0, 15),
)
def test_one_changed_bit_changes_the_digest(
    sizes: list[int], dtype: torch.dtype, where: int, bit: int
) -> None:
    tensors = [torch.linspace(-1, 1, n).to(dtype) for n in sizes]
    before = digest(tensors)
    assert before == digest([tensor.clone() for tensor in tensors])
    raw = torch.cat(tensors).view(torch.int16)
    raw[where % len(raw)] ^= torch.tensor(1 << bit).to(torch.int16)
    changed = torch.split(raw.view(dtype), sizes)
    assert digest(changed) != before


def test_the_digest_depends_on_order_but_not_on_strides() -> None:
    x = torch.randn(2 * SLICE["cpu"] + 5, 2, generator=torch.Generator().manual_seed(0))
    assert digest([x]) == digest([x.T.contiguous().T])
    assert digest([x]) != digest([x.flip(0)])
    first, second = x.unbind(1)
    assert digest([first, second]) != digest([second, first])
    rolled = x.roll(SLICE["cpu"] // 2, 0)  # by a whole slice of two columns
    assert digest([x]) != digest([rolled])


def test_the_majority_and_the_error_without_one() -> None:
    assert majority([1, 1, 2]) == 1
    assert majority([1, 2]) is None
    check([5, 5], [0, 1], "round 1")
    with pytest.raises(
        EngineError, match=r"^round 3: rank 7, 9 have other parameters than the majority, rank 2, 4, 8"
    ):
        check([1, 0, 1, 1, 2], [2, 7, 4, 8, 9], "round 3")
    with pytest.raises(EngineError, match=r"no majority has the same: 0, 2 \| 1, 3\. Call .* source=RANK\)"):
        check([1, 2, 1, 2], [0, 1, 2, 3], "round 3")


# ---- ranks ---------------------------------------------------------------------------------------


class Net(nn.Module):
    """A batch norm's statistics follow each rank's own data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Linear(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return outputs


def backward(net: nn.Module, rank: int, t: int) -> None:
    net.zero_grad()
    random = torch.Generator().manual_seed(100 * t + rank)
    net(torch.randn(8, 5, generator=random) + rank).square().sum().backward()


def nudge(model: Net) -> None:
    """The smallest change of one weight."""
    with torch.no_grad():
        weight = model.last.weight[0]
        weight[3] = torch.nextafter(weight[3], torch.tensor(9.0))


def drifting(rank: int, world: int, folder: str, over_ddp: bool) -> dict[str, Any]:
    """Rank 1's weight changes before round 3; parameters are compared in rounds 2, 4, ..."""
    model = Net()
    net: nn.Module = DistributedDataParallel(model, broadcast_buffers=False) if over_ddp else model
    state = VoteState(net, "weighted", check_every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-10)

    def step() -> None:
        backward(net, rank, state.round + 1)
        if not over_ddp:
            vote_gradients(state)
        optimizer.step()

    def register() -> None:
        if isinstance(net, DistributedDataParallel):
            net.register_comm_hook(state, vote_hook)

    register()
    step()
    step()
    found: dict[str, Any] = {"statistics": model.norm.running_mean.tolist()}  # type: ignore[union-attr]
    if rank == 1:
        nudge(model)
    step()
    with pytest.raises(EngineError) as error:
        step()
    found["error"] = str(error.value)
    with pytest.raises(EngineError) as error:
        save(folder, state, {"model": model.state_dict()})
    found["save"] = str(error.value)
    before = checksum(model)
    found["odd"] = copy_from_majority(state, model)
    found["changed"] = checksum(model) != before
    found["buffers"] = model.norm.running_mean.tolist()  # type: ignore[union-attr]
    if over_ddp:
        net = DistributedDataParallel(model, broadcast_buffers=False)
        register()
    for _ in range(3):
        step()
    save(folder, state, {"model": model.state_dict()})
    found["end"] = (state.round, checksum(model))
    with pytest.raises(EngineError, match=r"source is rank 9; it must be one of \[0, 1, 2\]"):
        copy_from_majority(state, model, source=9)
    assert copy_from_majority(state, model, source=2) == ()
    return found


@pytest.mark.parametrize("over_ddp", [False, True])
def test_a_rank_that_drifts_is_named_and_brought_back(over_ddp: bool, tmp_path: Path) -> None:
    found = together(3, drifting, str(tmp_path / "saved"), over_ddp, folder=tmp_path)
    assert len({str(answer["statistics"]) for answer in found}) == 3  # which is no drift
    for rank, answer in enumerate(found):
        assert answer["error"] == (
            "round 4: rank 1 has other parameters than the majority, rank 0, 2. Call copy_from_majority(state, model)"
            " on every rank and repeat the step, or resume from a checkpoint; check_every=0 turns this check"
            " off"
        )
        assert answer["save"].startswith("the checkpoint of round 3: rank 1 has other parameters")
        assert answer["odd"] == (1,)
        assert answer["changed"] == (rank == 1)
        assert answer["buffers"] == found[0]["buffers"]
        assert answer["end"] == (6, found[0]["end"][1])


def unchecked(rank: int, world: int) -> int:
    """As many rounds as it likes, with check_every=0."""
    model = Net()
    state = VoteState(model, "majority", check_every=0)
    for t in range(1, 5):
        if rank == 1 and t == 2:
            nudge(model)
        backward(model, rank, t)
        vote_gradients(state)
    return state.round


def silent(rank: int, world: int, zeros: str, over_ddp: bool) -> list[Any]:
    """No rank has a finite gradient in round 2, and only rank 1 has none in round 4."""
    trainer = Trainer(rank, config("robust", world, 8, zeros=zeros), over_ddp=over_ddp)
    honest = trainer.loss
    bad = {(0, 2), (1, 2), (1, 4)}
    trainer.loss = lambda t: honest(t) * (torch.nan if (rank, t) in bad else 1.0)  # type: ignore[method-assign]
    found: list[Any] = []
    for _ in range(4):
        sums = trainer.train(1)
        report = trainer.state.report
        gradients = [p.grad.abs().sum().item() for p in trainer.model.parameters() if p.grad is not None]
        found.append((sums[0], report.voters, sorted(report.abstained), sum(gradients)))
    return found


def both(rank: int, world: int) -> dict[str, Any]:
    ways = [(zeros, over_ddp) for zeros in ("coin", "abstain") for over_ddp in (True, False)]
    found: dict[str, Any] = {
        f"{zeros} {over_ddp}": silent(rank, world, zeros, over_ddp) for zeros, over_ddp in ways
    }
    return found | {"unchecked": unchecked(rank, world)}


def test_a_round_in_which_no_rank_votes_moves_nothing(tmp_path: Path) -> None:
    """Equal on all ranks; the next round continues. And nothing is compared with check_every=0."""
    one, other = together(2, both, folder=tmp_path)
    assert one == other
    assert one.pop("unchecked") == 4
    for way, (first, second, third, fourth) in one.items():
        assert second[0] == first[0], way
        assert second[1:] == ((), [0, 1], 0.0), way
        assert third[0] != second[0], way
        assert third[1:3] == ((0, 1), []), way
        assert fourth[1:3] == ((0,), [1]), way


def quorum(rank: int, world: int) -> list[Any]:
    """Rank 1 declares no batch size, and has no finite gradient in round 2, in which two must vote."""
    trainer = Trainer(rank, config("weighted", world, 3), batch_size=4 * (rank == 0), min_voters=2)
    honest = trainer.loss
    trainer.loss = lambda t: honest(t) * (torch.nan if (rank, t) == (1, 2) else 1.0)  # type: ignore[method-assign]
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0, weight_decay=0.5)
    return [(trainer.train(1)[0], trainer.state.report.notices) for _ in range(3)]


def test_below_the_quorum_no_rank_moves_and_all_notice_the_same(tmp_path: Path) -> None:
    one, other = together(2, quorum, folder=tmp_path)
    assert one == other
    (first, sizes), (second, few), (third, nothing) = one
    assert first == second != third
    assert sizes == ("round 1: worker 1 declared no batch size, but 1 other did",)
    assert few == ("round 2: fewer than 2 voted, so no parameter moved",)
    assert nothing == ()


@pytest.mark.usefixtures("alone")
def test_settings_of_the_check(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="check_every is -1; it must be 0 or more rounds"):
        VoteState(nn.Linear(2, 2), check_every=-1)
    state = VoteState(nn.Linear(2, 2))
    assert state.poll.check_every == 100
    assert load(tmp_path, state) is None
