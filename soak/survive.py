"""Six workers on hosts of their own lose each other again and again, and nobody else restarts.

    python -m soak.survive --events 40 --minutes 10 --out benchmarks/survive/events.json     # as root, on Linux

Every host is a network namespace, joined to the others by a bridge. An event is forced on one worker, or on two; the
next one comes when all are back. In the end the logs of all processes are replayed by `Worker` and `Server` with the
same absences: after every round, on every worker, the parameters must be equal bit for bit.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from tests.elastic import Crew, History, Plan, check
from tests.namespaces import Namespaces, Refused

from soak.driver import Episode, Skipped, Stage

WORLD = 6
LATE = 6  # the worker that joins late
STEP = 0.2  # seconds that a gradient takes, about
AWAY = 10.0  # seconds for which a worker is stopped or a link is down
SETTINGS = {"timeout": 3.0, "answer": 1.5, "patience": 600.0}
PATIENCE = 300.0  # seconds until all must be back
MARGIN = 20  # rounds that are still to come when the end is announced


@contextmanager
def hosts(count: int) -> Iterator[Namespaces]:
    """Hosts that are gone afterwards; worker w has 10.78.0.(w + 1)."""
    made = Namespaces("survive", "10.78.0", count)
    try:
        made.build()
        yield made
    except Refused as why:
        raise Skipped(f"{why}; it needs root") from None
    finally:
        made.tear_down()


def computes(t: int, optimizer: Any, worker: int, plan: Plan) -> None:
    """As if a gradient took longer; a little longer on some workers."""
    time.sleep(STEP * (1 + 0.02 * worker))


class Play:
    """The workers, and what happens to them."""

    def __init__(self, crew: Crew, network: Namespaces, chance: random.Random) -> None:
        self.crew = crew
        self.network = network
        self.chance = chance
        self.present = set(range(WORLD))
        self.events: list[dict[str, Any]] = []

    # ---- events --------------------------------------------------------------------------------------

    def kill(self, *victims: int) -> None:
        """Kill processes; they start again at once."""
        for worker in victims:
            self.crew.signal(worker, signal.SIGKILL)
        for worker in victims:
            self.crew.start(worker, computes)

    def stop(self, *victims: int) -> None:
        """Stop processes for a while."""
        for worker in victims:
            self.crew.signal(worker, signal.SIGSTOP)
        time.sleep(AWAY)
        for worker in victims:
            self.crew.signal(worker, signal.SIGCONT)

    def cut(self, *victims: int) -> None:
        """Cut links for a while."""
        for worker in victims:
            self.network.link(worker, "down")
        time.sleep(AWAY)
        for worker in victims:
            self.network.link(worker, "up")

    def kill_and_cut(self, one: int, other: int) -> None:
        """Two at once, in two ways."""
        self.network.link(other, "down")
        self.kill(one)
        time.sleep(AWAY)
        self.network.link(other, "up")

    def join(self) -> None:
        """A worker that was not there at the start joins."""
        self.crew.start(LATE, computes)
        self.present.add(LATE)

    def leave(self) -> None:
        """It is gone for good."""
        self.crew.signal(LATE, signal.SIGKILL)
        self.present.remove(LATE)

    # ---- the play ------------------------------------------------------------------------------------

    def rounds(self) -> dict[int, int]:
        """The last round of each worker."""
        return {worker: self.crew.round_of(worker) for worker in self.present}

    def are_together(self, after: int) -> bool:
        """Whether all workers have voted together in a round after this one."""
        for worker in self.present:
            log = self.crew.tail(worker)
            if not any(set(line.get("voters", ())) == self.present and line["round"] > after for line in log):
                return False
        return True

    def event(self, kind: str) -> None:
        """One event, and the time until all are back."""
        act, victims = self._chosen(kind)
        before = max(self.rounds().values())
        begun = time.time()
        act(*victims)
        done = time.time()
        self.crew.wait_for(lambda: self.are_together(before + 2))
        self.events.append(
            {
                "event": kind,
                "workers": list(victims),
                "after round": before,
                "seconds until all are back": round(time.time() - begun, 2),
                "begun": begun,
                "done": done,
            }
        )

    def _chosen(self, kind: str) -> tuple[Callable[..., None], tuple[int, ...]]:
        """What is done, and to whom."""
        workers = sorted(self.present - {LATE})
        one, other = self.chance.sample(workers, 2)
        if kind == "late":
            return (self.leave if LATE in self.present else self.join), ()
        chosen: dict[str, tuple[Callable[..., None], tuple[int, ...]]] = {
            "kill": (self.kill, (one,)),
            "kill first": (self.kill, (0,)),  # proposes the views, and serves the founding
            "stop": (self.stop, (one,)),
            "link": (self.cut, (one,)),
            "kill two": (self.kill, (one, other)),
            "kill one, cut one": (self.kill_and_cut, (one, other)),
        }
        return chosen[kind]


KINDS = ("kill", "stop", "link", "late", "kill two", "kill first", "kill one, cut one", "link")


def play(folder: Path, seed: int, events: int, minutes: float) -> dict[str, Any]:
    """Play events, and compare all parameters with a replay."""
    chance = random.Random(seed)
    with hosts(WORLD + 1) as network:
        peers = [f"10.78.0.{worker + 1}:29400" for worker in range(WORLD)]
        plan = Plan(
            world=WORLD + 1,
            rounds=10**6,
            peers=peers,
            folder=str(folder),
            late={LATE: f"10.78.0.{LATE + 1}:29400"},
            networks=network.names,
            saves=True,
            more=SETTINGS,
        )
        with Crew(plan) as crew:
            for worker in range(WORLD):
                crew.start(worker, computes)
            acted = Play(crew, network, chance)
            crew.wait_for(lambda: acted.are_together(5))
            begun = time.time()
            for number in range(events):
                time.sleep(max(0.0, begun + 60 * minutes * number / events - time.time()))
                acted.event(KINDS[number % len(KINDS)])
                print(number + 1, acted.events[-1], flush=True)
            took = time.time() - begun
            last = max(acted.rounds().values()) + MARGIN
            Path(folder, "new").write_text(str(last))
            Path(folder, "new").rename(folder / "last")
            sums = crew.ends(*acted.present)
            story = check(plan, crew.logs, last)
            return summary(acted, story, sums, last, took)


def summary(acted: Play, story: History, sums: set[int], last: int, took: float) -> dict[str, Any]:
    """What happened, in numbers."""
    crew = acted.crew
    deaths = Counter(w for each in acted.events for w in _killed(each))
    restarts = {worker: crew.starts[worker] - 1 - deaths[worker] for worker in range(WORLD)}
    times = _finished(crew)
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for place, each in enumerate(acted.events):
        end = acted.events[place + 1]["begun"] if place + 1 < len(acted.events) else float("inf")
        moments = [moment for moment in times if each["begun"] - 1 <= moment < end]
        pauses = [b - a for a, b in pairwise(moments)]
        each["longest pause, seconds"] = round(max(pauses), 2)
        each["rounds lost by a survivor"] = _lost(crew, acted, each, end)
        by_kind.setdefault(each["event"], []).append(each)
    for each in acted.events:
        del each["begun"], each["done"]
    return {
        "what": __doc__.splitlines()[0],
        "settings": {**SETTINGS, "seconds away": AWAY, "seconds of a gradient": STEP},
        "events": len(acted.events),
        "minutes": round(took / 60, 2),
        "rounds": last,
        "restarts of survivors": sum(restarts.values()),
        "most rounds lost by a survivor in an event": max(
            each["rounds lost by a survivor"] for each in acted.events
        ),
        "rounds decided without somebody": sum(len(some) < WORLD for some in story.voters.values()),
        "rounds finished alone and dropped": sum(map(len, story.alone.values())),
        "different parameters in the end": len(sums) - 1,
        "rounds equal to the replay": last,
        "by kind": {
            kind: {
                "events": len(some),
                "median of the longest pause, seconds": median(e["longest pause, seconds"] for e in some),
                "most": max(e["longest pause, seconds"] for e in some),
                "median of seconds until all are back": median(e["seconds until all are back"] for e in some),
            }
            for kind, some in by_kind.items()
        },
        "log": acted.events,
    }


def _killed(event: dict[str, Any]) -> list[int]:
    workers: list[int] = event["workers"]
    if event["event"] == "kill one, cut one":
        return workers[:1]
    return workers if event["event"].startswith("kill") else []


def _finished(crew: Crew) -> list[float]:
    """When each round was finished first, by anybody."""
    first: dict[int, float] = {}
    for log in crew.logs.values():
        for line in log:
            if "voters" in line:
                first[line["round"]] = min(line["time"], first.get(line["round"], float("inf")))
    return sorted(first.values())


def _lost(crew: Crew, acted: Play, event: dict[str, Any], end: float) -> int:
    """The most rounds that one survivor computed a gradient for in vain, or missed."""
    if end == float("inf"):
        end = event["done"] + 5
    most = 0
    for worker, log in crew.logs.items():
        if worker in event["workers"] or worker == LATE:
            continue
        lines = [line for line in log if "time" in line and event["begun"] <= line["time"] < end]
        most = max(most, sum(line["round"] - line["tried"] + 1 for line in lines if "voters" not in line))
    return most


def survivors(stage: Stage) -> Episode:
    """The scenario of `python -m soak`: a few events of each kind."""
    events = max(4, int(stage.seconds / 20))
    found = play(stage.folder, stage.chance.randrange(10**6), events, 0)
    assert found["restarts of survivors"] == 0
    assert found["different parameters in the end"] == 0
    return Episode(injected=events, survived=events, lost=found["rounds finished alone and dropped"])


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        found = play(Path(folder), options.seed, options.events, options.minutes)
    text = json.dumps(found, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
