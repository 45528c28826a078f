"""Workers that come and go, as threads of one process: each with sockets, groups and registers of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from signvote import ConfigError, Members, Vote
from signvote.engines.ddp import modules, past
from signvote.engines.ddp.sealed import FAULTS, Seal, fault_of, sealed
from tests.elastic import Crew, Plan, addresses, check, fall_dead
from tests.ranks import PATIENCE, checksum, fresh, wait_for

PAGE = Path(__file__).parent.parent / "docs" / "survive.md"


def plan_for(folder: Path, world: int, rounds: int = 10**6, **more: Any) -> Plan:
    settings = {"timeout": more.pop("timeout", 900.0), "patience": more.pop("patience", 900.0)}
    peers = addresses(world - more.pop("later", 0))
    return Plan(world=world, rounds=rounds, peers=peers, folder=str(folder), more=settings, **more)


def at(t: int, act: Callable[..., object]) -> Callable[..., None]:
    """Do something before the step of one round, once."""
    times = count()

    def do(round: int, optimizer: Vote, worker: int, plan: Plan) -> None:
        if round == t and next(times) == 0:
            act(optimizer, worker, plan)

    return do


def waits_less(optimizer: Vote, **settings: float) -> None:
    """Change how long a worker waits, once all have met: how long that takes decides nothing."""
    company = optimizer.poll.company  # type: ignore[attr-defined]
    company.settings = company.membership.settings = replace(company.settings, **settings)


def dies(optimizer: Vote, worker: int, plan: Plan) -> None:
    fall_dead(optimizer)


def dies_in(name: str, call: int) -> Callable[..., None]:
    """Die at a call of the group."""

    def act(optimizer: Vote, worker: int, plan: Plan) -> None:
        group = optimizer.poll.company.group  # type: ignore[attr-defined]
        usual, calls = getattr(group, name), count(1)

        def deadly(*args: Any) -> Any:
            return fall_dead(optimizer) if next(calls) == call else usual(*args)

        setattr(group, name, deadly)

    return act


@pytest.mark.parametrize(("name", "call"), [("all_to_all", 1), ("all_gather", 1), ("all_gather", 2)])
def test_one_that_dies_at_any_point_of_a_round_comes_back(name: str, call: int, tmp_path: Path) -> None:
    plan = plan_for(tmp_path, 4, saves=call == 2)
    with Crew(plan, threads=True) as crew:
        for worker in range(4):
            crew.start(worker, at(5, dies_in(name, call)) if worker == 0 else None)
        crew.start(0)
        crew.wait_for(lambda: crew.round_of(0) >= 8)
        story = crew.finish(0, 1, 2, 3)
    assert len(story.voters[5]) in (3, 4)
    assert crew.starts == {0: 2, 1: 1, 2: 1, 3: 1}


def test_two_of_five_at_once_and_a_late_one(tmp_path: Path) -> None:
    plan = plan_for(tmp_path, 6, later=1)
    plan.late[5] = addresses(1)[0]
    with Crew(plan, threads=True) as crew:
        for worker in range(5):
            crew.start(worker, at(5, dies) if worker in (0, 3) else None)
        crew.wait_for(lambda: crew.round_of(1) >= 8)
        crew.start(5)
        crew.start(0)
        crew.start(3)
        crew.wait_for(lambda: min(map(crew.round_of, range(6))) >= 10)
        story = crew.finish(*range(6))
    assert story.voters[5] == [1, 2, 4]


def test_one_that_hangs_is_absent_and_returns_with_its_momentum(tmp_path: Path) -> None:
    """It sleeps for more rounds than are kept, so it gets the parameters of another one."""
    plan = plan_for(tmp_path, 3)
    sleeping = Event()

    def hangs(optimizer: Vote, worker: int, plan: Plan) -> None:
        sleeping.set()
        log = plan.log(1)
        wait_for(lambda: len(log.read_text().splitlines()) > 20 + past.KEPT)

    def gives_up(optimizer: Vote, worker: int, plan: Plan) -> None:
        """What happens once `timeout` is over, in the group and then in the look for others, happens now."""
        assert sleeping.wait(PATIENCE)
        company = optimizer.poll.company  # type: ignore[attr-defined]
        company.lose("the others wait no longer")
        membership = company.membership
        usual, late = membership._may_come, SimpleNamespace(seconds=2 * PATIENCE)
        membership._may_come = lambda *seen: usual(*seen[:3], late if membership.view.epoch == 1 else seen[3])

    with Crew(plan, threads=True) as crew:
        for worker in range(3):
            crew.start(worker, at(5, hangs if worker == 2 else gives_up))
        crew.wait_for(lambda: crew.round_of(2) >= 30)
        story = crew.finish(0, 1, 2)
    assert story.voters[5] == [0, 1]


def test_a_minority_stops_and_says_so(tmp_path: Path) -> None:
    plan = plan_for(tmp_path, 3)

    dead = []

    def is_gone(optimizer: Vote, worker: int, plan: Plan) -> None:
        try:
            fall_dead(optimizer)
        finally:
            dead.append(worker)

    def looks_briefly(optimizer: Vote, worker: int, plan: Plan) -> None:
        wait_for(lambda: len(dead) == 2)
        waits_less(optimizer, patience=1.0)

    with Crew(plan, threads=True) as crew:
        for worker in range(3):
            crew.start(worker, at(5, is_gone if worker else looks_briefly))
        wait_for(lambda: any("error" in line for line in crew.log(0)))
        error = crew.log(0)[-1]["error"]
    assert re.search(
        r"worker 0 reaches 1 of 3 members \(worker 0\), and looked for a majority for \d+ s\."
        " A minority does not continue",
        error,
    ), error
    assert crew.round_of(0) == 4


def test_below_the_quorum_nothing_moves_and_all_are_in_the_same_round(tmp_path: Path) -> None:
    plan = plan_for(tmp_path, 3, 4, options={"min_voters": 4})
    with Crew(plan, threads=True) as crew:
        for worker in range(3):
            crew.start(worker)
        assert crew.ends(0, 1, 2) == {checksum(fresh(plan.config))}


def test_one_that_leaves_after_all_others_died_waits_for_a_while_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_for(tmp_path, 3)

    def leaves(optimizer: Vote, worker: int, plan: Plan) -> None:
        waits_less(optimizer, timeout=1.0)
        optimizer.leave()
        fall_dead(optimizer)

    with Crew(plan, threads=True) as crew:
        for worker in range(3):
            crew.start(worker, at(5, dies if worker else leaves))
        wait_for(lambda: "worker 0 left, and not all others with it" in caplog.text)
    assert "a minority does not continue" in caplog.text.lower()


def test_the_script_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "_all_modules", list)  # see Crew
    monkeypatch.chdir(tmp_path)
    text = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert text is not None
    script = text[1].replace("ROUNDS = 200", "ROUNDS = 12").replace("int(sys.argv[1])", "WORKER")
    peers = addresses(3)
    script = re.sub(r"PEERS = .*", f"PEERS = {peers}", script)
    found: list[dict[str, Any]] = [{"WORKER": worker} for worker in range(3)]
    threads = [Thread(target=exec, args=(script, names), daemon=True) for names in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [names["optimizer"].round for names in found] == [12] * 3
    assert len({checksum(names["model"]) for names in found}) == 1
    assert len(list(tmp_path.glob("momentum-*.safetensors"))) == 3


# ---- damage --------------------------------------------------------------------------------------


def damages(word: int, bit: int) -> Callable[..., None]:
    """Change the votes that travel to the other worker."""

    def act(optimizer: Vote, worker: int, plan: Plan) -> None:
        group = optimizer.poll.company.group  # type: ignore[attr-defined]
        usual = group.all_to_all

        def damaged(received: Any, sent: Any) -> None:
            sent[1, word] ^= 1 << bit
            usual(received, sent)
            del group.all_to_all

        group.all_to_all = damaged

    return act


@pytest.mark.parametrize(
    ("word", "bit", "fault"),
    [(0, 40, 1), (0, 1, 2), (1, 0, 3), (2, 0, 4), (3, 0, 5), (4, 40, 6), (4, 0, 7), (5, 17, 7)],
)
def test_damaged_votes_cost_a_vote_on_all_members(word: int, bit: int, fault: int, tmp_path: Path) -> None:
    plan = plan_for(tmp_path, 3, 8)
    found: list[str] = []

    def look(round: int, optimizer: Vote, worker: int, plan: Plan) -> None:
        found.extend(refusal.message for refusal in optimizer.report.refused)

    with Crew(plan, threads=True) as crew:
        for worker in range(3):
            crew.start(worker, at(5, damages(word, bit)) if worker == 0 else look)
        crew.ends(0, 1, 2)
        story = check_refused(crew)
    assert story.voters[5] == [1, 2]
    assert found == [f"round 5: the votes of worker 0 are {FAULTS[fault]}, and do not count"] * 2


def check_refused(crew: Crew) -> Any:
    """A worker whose votes are refused computed them, as one that finished a round alone did not."""
    return check(crew.plan, crew.logs, 8)


def test_damaged_numbers_end_the_view_and_the_round_is_tried_again(tmp_path: Path) -> None:
    plan = plan_for(tmp_path, 3, 8)

    def act(optimizer: Vote, worker: int, plan: Plan) -> None:
        group = optimizer.poll.company.group  # type: ignore[attr-defined]
        usual = group.all_gather
        group.all_gather = lambda mine: usual(mine ^ 1)

    with Crew(plan, threads=True) as crew:
        for worker in range(3):
            crew.start(worker, at(5, act) if worker == 1 else None)
        crew.ends(0, 1, 2)
        story = check(plan, crew.logs, 8)
    assert story.voters[5] == [0, 1, 2]


def test_a_header_tells_what_is_wrong() -> None:
    seal = Seal(1, 2, 3, 4)
    row = sealed(seal, torch.arange(5))
    assert fault_of(row, seal) == 0
    for field, fault in (("kind", 2), ("epoch", 3), ("round", 4), ("sender", 5)):
        assert fault_of(row, seal._replace(**{field: 9})) == fault


# ---- what is refused -----------------------------------------------------------------------------

PEERS = ["127.0.0.1:1", "127.0.0.1:2"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peers": []}, "peers is empty; give the addresses of the workers that start together"),
        ({"peers": ["nowhere"]}, "'nowhere' is no address; write HOST:PORT, as in 10.0.0.1:29400"),
        ({"worker_id": 5}, "worker 5 is not among the peers; give its own address=HOST:PORT"),
        ({"timeout": 0}, "timeout is 0; it must be above 0"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Members(**{"peers": PEERS, "worker_id": 0, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"worker_id": 1}, "with members, the worker id is that of Members"),
        ({"group": object()}, "members makes its own groups"),
        ({"balancer": object()}, "members does not support a balancer"),
        ({"rule": "it-signsgd"}, "rule 'it-signsgd' keeps counters per coordinate"),
        ({"rule": "mean"}, "rule 'mean' keeps counters per coordinate"),
        ({"feedback": True}, "members supports neither top, feedback nor polar"),
        ({"polar": True}, "members supports neither top, feedback nor polar"),
        ({"top": 0.1}, "members supports neither top, feedback nor polar"),
        ({"overlap": True}, "members does not support overlap=True"),
    ],
)
def test_what_members_do_not_support(settings: dict[str, Any], message: str) -> None:
    model = nn.Linear(2, 1)
    members = Members(peers=PEERS, worker_id=0)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ConfigError, match=message):
        Vote(model.parameters(), members=members, **settings).step()
