"""Flower: deployed as processes, in its simulation, and in one process where that is enough."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message
from tests import test_flower
from tests.flower_apps.same import CONFIGS, TASK
from tests.flower_cluster import Cluster, cluster, free_port, wait_for, write_app
from tests.ranks import PATIENCE
from tests.test_flower_deployment import APP
from tests.test_flower_simulation import APPS, TWO_ACTORS

from signvote import Layout, checkpoint
from signvote.engines.flower import SignVote
from signvote.engines.flower.records import BALLOT, to_array
from signvote.sim import train
from soak import memory
from soak.core import is_refused
from soak.damage import damaged, rewrite
from soak.driver import Episode, Stage
from soak.links import Relay, relay_to
from soak.processes import kill, measured, start, stop_for
from soak.states import equal
from soak.test_flower_deployment import test_a_deployment_trains_through_failures_and_resumes

NODES = 3
ROUNDS = 3  # of a deployment, in which every round starts processes
FAULTS = 12  # in an episode
os.environ.setdefault("RAY_worker_niceness", "0")  # or its workers wait for everybody else
logging.getLogger("flwr").setLevel(logging.ERROR)  # its rounds would be most of what the soak prints


# ---- deployed ----------------------------------------------------------------------------------------


def deployment(stage: Stage) -> Episode:
    """SuperLink, ServerApp and a node are killed; three bad ballots; a node that is not registered."""
    test_a_deployment_trains_through_failures_and_resumes(stage.folder)
    return Episode(injected=7, survived=7)


def deployed_links(stage: Stage) -> Episode:
    """Nodes reach the SuperLink through a relay that is slow or breaks, and are stopped: the same bits.

    Flower sends again what was cut off. If a reply is lost for good, the round ends with the QuorumError, and the run
    is started again.
    """
    models = []
    faults = 0
    is_resumed = False
    with cluster(stage.folder / "home") as c:
        c.superlink()
        with relay_to(c.port) as relay:
            for node in range(NODES):
                supernode(c, node, relay.port)
            for name in ("undisturbed", "disturbed"):
                saved = stage.folder / f"{name}.safetensors"
                app = write_app(stage.folder / name, APP, settings(saved))
                c.start(name, "flwr", "run", str(app), "here", "--stream")
                if name == "disturbed":
                    faults = disturb(stage, c, relay, saved)
                wait_for(lambda: rounds_in(saved) == ROUNDS or "QuorumError" in c.log(name), 600, name)  # noqa: B023
                if rounds_in(saved) < ROUNDS:
                    is_resumed = True
                    c.start(name, "flwr", "run", str(app), "here", "--stream")
                    wait_for(lambda: rounds_in(saved) == ROUNDS, 600, f"{name}, resumed")  # noqa: B023
                models.append(checkpoint.load(saved)["model"])
    assert is_resumed or equal(*models), "the models differ"
    return Episode(injected=faults, survived=faults, lost=int(is_resumed))


def settings(saved: Path) -> dict[str, object]:
    """Every round waits for all nodes."""
    all_nodes = {"min-nodes": NODES, "min-ballots": NODES}
    return {"rounds": ROUNDS, "deadline": 240.0, "checkpoint": str(saved), **all_nodes}


def supernode(c: Cluster, node: int, port: int) -> None:
    config = f'partition-id={node} num-partitions={NODES} faults=""'
    where = ["--superlink", f"127.0.0.1:{port}", "--port", str(free_port())]
    c.start(f"node{node}", "flower-supernode", "--insecure", *where, "--node-config", config)


def disturb(stage: Stage, c: Cluster, relay: Relay, saved: Path) -> int:
    """Cut or slow the links, or stop a node, until the run is done, or some times; how often."""
    for fault in range(FAULTS):
        time.sleep(3 * stage.chance.random())
        if rounds_in(saved) == ROUNDS:
            return fault
        seconds = stage.chance.random()
        kind = stage.chance.choice(("cut", "slow", "stop"))
        if kind == "cut":
            relay.cut(seconds)
        elif kind == "slow":
            relay.slow(stage.chance.choice((20_000, 200_000)), 4 * seconds)
        else:
            stop_for(c.processes[f"node{stage.chance.randrange(NODES)}"].pid, 2 * seconds)
    return FAULTS


# ---- simulated ---------------------------------------------------------------------------------------


def simulation_stops(stage: Stage) -> Episode:
    """Processes of Flower's simulation are stopped: trust and parameters are those of our simulator."""
    app = write_app(stage.folder / "app", APPS / "same.py", {"out": str(stage.folder)})
    last = CONFIGS[-1]
    saved = stage.folder / f"{last.rule}.safetensors"
    with cluster(stage.folder / "home") as c:
        c.superlink("--simulation")
        c.start("run", "flwr", "run", str(app), "here", "--stream", "--federation-config", TWO_ACTORS)
        for _ in range(FAULTS):
            time.sleep(stage.chance.random())
            with suppress(ProcessLookupError):
                stop_for(stage.chance.choice(sorted(c.pids())), stage.chance.random())
        wait_for(lambda: rounds_in(saved) == last.rounds, 600, "the run does not end")
    for config in CONFIGS:
        train(config, TASK, stage.folder / config.rule)
        ours = checkpoint.load(stage.folder / config.rule / "checkpoint.safetensors")
        theirs = checkpoint.load(stage.folder / f"{config.rule}.safetensors")
        assert equal(theirs["model"], ours["model"]), f"{config.rule}: the models differ"
        assert equal(theirs["server"], ours["server"]), f"{config.rule}: the trust differs"
    return Episode(injected=FAULTS, survived=FAULTS, lost=0)


# ---- in one process ----------------------------------------------------------------------------------


def rounds_in(saved: Path) -> int:
    return int(checkpoint.load(saved)["server"]["last_round"]) if saved.exists() else 0


def train_here(rule: str, rounds: int, saved: str) -> None:
    """A whole federation in this process, with a checkpoint after each round."""
    test_flower.train(test_flower.grid_of(), rounds, rule=rule, checkpoint=saved)


def kills(stage: Stage) -> Episode:
    """The process is killed at random moments: the next one continues after the last round."""
    rule = stage.chance.choice(("weighted", "it-signsgd", "robust"))
    rounds, faults = 40, 6
    saved = stage.folder / "run.safetensors"
    whole = stage.folder / "whole.safetensors"
    train_here(rule, rounds, str(whole))
    for _ in range(faults):
        process = start(train_here, rule, rounds, str(saved))
        before = rounds_in(saved)
        while rounds_in(saved) == before and process.is_alive():
            time.sleep(0.01)
        time.sleep(0.1 * stage.chance.random())
        kill(process)
    process = start(train_here, rule, rounds, str(saved))
    process.join(PATIENCE)
    assert process.exitcode == 0
    assert equal(checkpoint.load(saved), checkpoint.load(whole))
    return Episode(injected=faults, survived=faults)


def bad_replies(stage: Stage) -> Episode:
    """One node of three answers with noise, or not at all: the others train as if it had been silent."""
    rounds = 30
    bad = {t: stage.chance.choice(KINDS) for t in range(1, rounds + 1) if stage.chance.random() < 0.5}
    models = []
    for misbehaves in (True, False):
        faults = bad if misbehaves else dict.fromkeys(bad, "error")
        grid = test_flower.grid_of(test_flower.honest, test_flower.honest, faulty(faults, stage))
        models.append(test_flower.train(grid, rounds).model)
    assert equal(*models)
    return Episode(injected=len(bad), survived=len(bad), lost=0)


KINDS = ("error", "noise", "nothing", "cut")


def faulty(bad: dict[int, str], stage: Stage) -> Callable[[Message, Context], Message]:
    """A node that misbehaves in some rounds, after it has voted honestly."""

    def answer(message: Message, context: Context) -> Message:
        reply = test_flower.honest(message, context)
        kind = bad.get(int(message.content.config_records["signvote"]["round"]), "")  # type: ignore[arg-type]
        if kind == "error":
            raise RuntimeError("out of memory")
        if kind == "noise":
            reply.content[BALLOT] = ArrayRecord({BALLOT: to_array(stage.chance.randbytes(500))})
        elif kind == "nothing":
            del reply.content[BALLOT]
        elif kind == "cut":
            sent = reply.content.array_records[BALLOT][BALLOT].numpy().tobytes()
            reply.content[BALLOT] = ArrayRecord({BALLOT: to_array(sent[: stage.chance.randrange(len(sent))])})
        return reply

    return answer


def damaged_checkpoints(stage: Stage) -> Episode:
    """A damaged checkpoint is refused, and the good one continues."""
    saved = stage.folder / "run.safetensors"
    train_here("robust", 4, str(saved))
    good = saved.read_bytes()
    state = checkpoint.load(saved)

    def load() -> dict[str, Any]:
        model = test_flower.fresh()
        strategy = SignVote(Layout.of(model), "robust")
        strategy.load_state_dict(checkpoint.load(saved))
        return strategy.state_dict()

    faults, survived = 100, 0
    for _ in range(faults):
        rewrite(saved, damaged(good, stage.chance))
        survived += is_refused(saved, load, state)
    rewrite(saved, good)
    assert equal(load(), state)
    return Episode(injected=faults, survived=survived)


def long_run(stage: Stage) -> Episode:
    """Thousands of rounds, in which nodes come and go: memory stays where it is."""
    found = measured(endless, stage.seconds)
    steady = memory.is_steady(found)
    return Episode(injected=1, survived=steady, rounds=found[-1][0], slope=memory.slope(found), lost=0)


def endless(seconds: float, samples: Any) -> None:
    """One strategy, started again every 25 rounds."""
    torch.set_num_threads(1)
    grid = test_flower.grid_of()
    model = test_flower.fresh()
    strategy = SignVote(Layout.of(model))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        grid.bytes_up.clear()
        grid.bytes_down.clear()
        strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=strategy.round + 25)
        samples.put((strategy.round, memory.resident()))
