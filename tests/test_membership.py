"""Views over real sockets: all agree, whoever asks first; and what each error says."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from signvote import ConfigError, EngineError, Members, Server, Vote
from signvote.core.encoding import Encoding
from signvote.core.layout import Layout
from signvote.core.rules import make_rule
from signvote.core.scaled import ScaledVotes
from signvote.engines.ddp import elastic, load, registers, save
from signvote.engines.ddp.catching_up import Story
from signvote.engines.ddp.members import KEYS, View, parsed
from signvote.engines.ddp.membership import FREE, Membership
from signvote.engines.ddp.past import Past
from signvote.engines.ddp.registers import LENGTH, MOST_BYTES, Registers, ask, serve
from signvote.engines.ddp.transport import Transport
from signvote.engines.ddp.view_group import Lost, Meeting
from tests.elastic import addresses
from tests.ranks import alone as alone

FACTS = {"rule": "weighted"}


def membership(worker: int, peers: list[str], facts: dict[str, str] = FACTS, **more: Any) -> Membership:
    settings: dict[str, Any] = {"timeout": 900.0, "answer": 60.0, "patience": 900.0, **more}
    return Membership(Members(peers=peers, worker_id=worker, **settings), facts)


@contextmanager
def members(count: int, **more: Any) -> Iterator[list[Membership]]:
    """Members of the first view."""
    peers = addresses(count)
    made = [membership(worker, peers, **more) for worker in range(count)]
    view = View(1, {each.worker: each.me for each in made})
    with ExitStack() as stack:
        for each in made:
            for key, value in zip(KEYS, (each.me.boot, None, None, FREE, FACTS), strict=True):
                each.registers.put(key, value)
            stack.callback(serve(each.registers, each.me.address))
            each._adopt(view)
        yield made


def at_once(*work: Callable[[], object]) -> list[BaseException | None]:
    """Do all of this in threads; the errors."""
    errors: list[BaseException | None] = [None] * len(work)

    def run(place: int) -> None:
        try:
            work[place]()
        except EngineError as error:
            errors[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_all_that_propose_at_once_come_to_one_view() -> None:
    with members(5) as made:
        views: list[View | None] = []

        def propose(each: Membership) -> None:
            seen = each._look(each.view.members)
            views.append(each._propose(View(2, {each.worker: each.me}), seen))

        at_once(*(partial(propose, each) for each in made[1:]))
        decided = [view for view in views if view is not None]
        last = None
        while last is None:
            last = made[0]._propose(View(2, {0: made[0].me}), made[0]._look(made[0].view.members))
        assert decided in ([], [last] * len(decided))


def test_all_members_found_and_regroup_and_let_one_in() -> None:
    peers = addresses(3)
    made = [membership(worker, peers) for worker in range(3)]
    with ExitStack() as stack:
        for each in made:
            stack.callback(each.close)
        assert at_once(*(each.enter for each in made)) == [None] * 3
        assert [each.view.epoch for each in made] == [1] * 3
        assert not any(each.has_joined for each in made)
        late = Membership(
            Members(peers=dict(enumerate(peers)), worker_id=7, address=addresses(1)[0], answer=60.0), FACTS
        )
        stack.callback(late.close)
        joining = threading.Thread(target=late.enter)
        joining.start()
        while not made[1].knocks:
            pass
        assert at_once(*(each.regroup for each in made)) == [None] * 3
        joining.join()
        assert [each.view.workers for each in (*made, late)] == [[0, 1, 2, 7]] * 4
        assert late.has_joined
        assert not made[1].knocks


def test_a_worker_that_differs_says_so_and_the_others_wait_for_it() -> None:
    peers = addresses(2)
    one = membership(0, peers, patience=1.0)
    other = membership(1, peers, {"rule": "majority"})
    errors = list(map(str, at_once(one.enter, other.enter)))
    assert errors[1] == "worker 1 differs from worker 0 in: rule"
    assert re.fullmatch(
        r"worker 0 waited 1 s; missing: (1|nobody)\. The first round needs all 2 peers; if some of them had started"
        " already, start all of them again",
        errors[0],
    )


def test_nobody_lets_it_in() -> None:
    with members(1) as (only,):
        late = Membership(
            Members(peers=[only.settings.address], worker_id=1, address=addresses(1)[0], patience=0.2), FACTS
        )
        with pytest.raises(
            EngineError,
            match=r"worker 1 is outside view 1, and nobody let it in for 0.2 s; 1 of 1 members answered",
        ):
            late.enter()
        late.close()
        assert list(only.knocks) == [1]


def test_an_address_that_is_taken() -> None:
    with members(1) as (only,), pytest.raises(EngineError, match=r"this worker cannot listen on 127\.\S+ \("):
        serve(Registers(), only.me.address)


# ---- registers -------------------------------------------------------------------------------------


def test_what_registers_refuse() -> None:
    own = Registers()
    with pytest.raises(ValueError, match="'slip' is not for others to write"):
        own.answer({"tell": "slip", "value": 1})
    address = parsed(addresses(1)[0])
    end = serve(own, address)
    with pytest.raises(EOFError, match="the connection ended in the middle of a frame"):
        ask(address, {"tell": "slip", "value": 1}, 60)
    with socket.create_connection(address) as connection:
        connection.sendall(LENGTH.pack(MOST_BYTES + 1))
        assert connection.recv(1) == b""
    with pytest.raises(ValueError, match=f"a frame of {MOST_BYTES + 1} bytes"):
        registers._received(_Fake(LENGTH.pack(MOST_BYTES + 1)))  # type: ignore[arg-type]
    end()
    with pytest.raises(registers.Refused):
        ask(address, {"read": []}, 60)


class _Fake:
    """A connection that holds some bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def recv(self, count: int) -> bytes:
        part, self.data = self.data[:count], self.data[count:]
        return part


# ---- groups ----------------------------------------------------------------------------------------


def test_a_meeting_ends_when_a_member_is_gone_or_ahead_or_late() -> None:
    with members(2) as (one, other):
        meeting = Meeting(one)
        meeting.set("0/0", "mine")
        assert meeting.get("0/0") == b"mine"
        assert not meeting.check(["0/1"])
        Meeting(other).set("0/1", b"theirs")
        assert meeting.get("0/1") == b"theirs"
        object.__setattr__(one.settings, "timeout", 0.1)
        with pytest.raises(RuntimeError, match="waited in vain for a member of view 1"):
            meeting.wait(["0/7"])
        other.registers.put("view", View(2, {}).to_json())
        with pytest.raises(RuntimeError, match="worker 1 is in view 1 no more"):
            meeting.wait(["0/7"])
    with pytest.raises(RuntimeError, match="worker 1 gives no answer"):
        meeting.wait(["0/7"])


def test_a_damaged_letter_is_not_read() -> None:
    layout = Layout([("w", (3,))])
    story = Story(None, Server(layout), Past(b"0" * 16))  # type: ignore[arg-type]
    with pytest.raises(Lost, match="the letter of another worker is damaged"):
        story._read(b"no letter", None)  # type: ignore[arg-type]


# ---- refused ---------------------------------------------------------------------------------------


def elastic_vote(**more: Any) -> tuple[nn.Module, Vote]:
    model = nn.Linear(2, 1)
    settings = Members(peers=["127.0.0.1:1"], worker_id=0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model, Vote(model.parameters(), members=settings, **more)


def test_a_round_that_fails_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = elastic_vote()
    poll = optimizer.poll
    assert isinstance(poll, elastic.ElasticPoll)

    def lost(story: Story) -> bool:
        raise Lost("it broke")

    monkeypatch.setattr(poll.company, "meet", lost)
    with pytest.raises(EngineError, match=f"round 1 failed {elastic.TRIES} times, at last: it broke"):
        optimizer.step()
    with pytest.raises(
        EngineError, match=f"{elastic.TRIES} views ended before their members had met, at last: it broke"
    ):
        poll._meet_at_last()


def test_what_is_for_the_other_kind(tmp_path: Path) -> None:
    _, optimizer = elastic_vote()
    message = "workers that come and go do not write a checkpoint together"
    with pytest.raises(ConfigError, match=message):
        save(tmp_path, optimizer, {})
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, optimizer)
    plain = Vote(nn.Linear(2, 1).parameters())
    with pytest.raises(ConfigError, match=r"leave\(\) is for Vote\(members=...\)"):
        plain.leave()


@pytest.mark.usefixtures("alone")
def test_shards_and_other_devices() -> None:
    rule = make_rule("weighted", Layout([("w", (3,))]))
    transport = Transport(overlap=False)
    with pytest.raises(ConfigError, match="members supports parameters on the CPU; these are on meta"):
        elastic.check(rule, Encoding(), transport, {"w": torch.empty(3, device="meta")})
    with pytest.raises(ConfigError, match="members does not support local steps and scaled votes"):
        elastic.check(ScaledVotes(rule), Encoding(), transport, {"w": torch.empty(3)})
    model = nn.Linear(2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ConfigError, match=r"members does not support sharded parameters \(FSDP\)"):
        elastic.check(rule, Encoding(), transport, dict(model.named_parameters()))
