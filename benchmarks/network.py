"""Seconds per step, and to a target, of DDP, its hooks, local steps and votes: four hosts, links of several speeds.

    python -m benchmarks.network                              # hours; as root, on Linux
    python -m benchmarks.network --goal gpt                   # the same for a small GPT
    python -m benchmarks.network --links 100 --parts links    # one link speed alone, in minutes
    python -m benchmarks.network --goal mnist-large --links 0 --parts links --methods float32 vote --out large.json

Hosts are network namespaces on this machine, see network_hosts.py. One process per host trains a perceptron of 5.5
million parameters on MNIST, or a GPT of 119,104 on the source of Python's standard library, over gloo, one thread each.
Bytes are the interface's, headers among them; packets that the kernel sends in one go count as one header.

targets    steps to the target (network_target.py), links not shaped: they do not depend on the link
links      seconds a step of each method and link. Methods take turns, so a busy machine slows all of them. Before
           each turn plain TCP streams show what the links carry: each host sends to the next, all at once
ends       whole runs on a link, which check that seconds to the target are steps x seconds a step

Writes benchmarks/network/GOAL.json; what is measured again replaces what was there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tests.namespaces import Refused

from benchmarks.network_host import Host
from benchmarks.network_hosts import HOSTS, Crew, Network, hosts
from benchmarks.network_methods import GRIDS, METHODS, SPEED_ONLY, settings_of
from benchmarks.network_target import SEEDS, chosen, curve, curves_of, steps_to_target
from benchmarks.network_tasks import GOALS

WARMUP, TURNS, MOST = 3, 3, 30  # steps before anything counts; turns of each method; its steps in all
STREAM = 2.0  # seconds of the plain streams before a turn
FOLDER = Path(__file__).with_suffix("")
Results = dict[str, Any]


def serve(options: argparse.Namespace) -> None:
    """Do what comes in as lines of JSON, and answer with one each, until there are no more."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed is no reply
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=options.rank, world_size=HOSTS, timeout=timedelta(minutes=30))
    host = Host(options.rank, options.goal, options.data_dir)
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        replies.write(json.dumps(getattr(host, what)(*arguments)) + "\n")
    dist.destroy_process_group()


def block(crew: Crew, method: str, count: int) -> dict[str, Any]:
    """Some steps: seconds of each, all and in the optimizer, and bytes of one, up and down, means of the hosts."""
    replies = crew.all("train", method, count)
    seconds, stepping = (
        [fmean(of_step) for of_step in zip(*(r[what] for r in replies), strict=True)]
        for what in ("seconds", "stepping")
    )
    up, down = (fmean(r[way] for r in replies) / count for way in ("up", "down"))
    return {"seconds": seconds, "stepping": stepping, "up": up, "down": down}


def measure_links(
    network: Network,
    crew: Crew,
    goal: str,
    curves: list[Any],
    options: argparse.Namespace,
    progress: Progress,
) -> Iterator[tuple[int, Results]]:
    """Each link speed, with what every method took there, and what the links carried."""
    network.shape(0)
    rounds, expected = {}, {}
    for method in progress.track(options.methods, description="warming up"):
        setting = chosen(curves, SPEED_ONLY.get(method, method)) or settings_of(goal, method)[0]
        crew.all("make", method, setting, 0)
        rounds[method] = crew.all("every", method)[0]
        if rounds[method] == 1:
            block(crew, method, WARMUP)
        seen = block(crew, method, max(2, rounds[method]))
        expected[method] = fmean(seen["seconds"]), seen["up"]
    for mbit in options.links:
        network.shape(mbit)
        blocks: dict[str, list[dict[str, Any]]] = {method: [] for method in options.methods}
        streams = list[dict[str, float]]()
        turns = [(turn, method) for turn in range(TURNS) for method in options.methods]
        for turn, method in progress.track(turns, description=name_of(mbit)):
            if mbit and method == options.methods[0]:
                streams += crew.all("stream", STREAM * (5 if mbit < 10 else 1))
            count = _count(expected[method], mbit, rounds[method], turn, options.seconds)
            if count:
                blocks[method].append(block(crew, method, count))
        carried = fmean(min(each["up"], each["down"]) for each in streams) if mbit else None
        by_method = {method: summary(blocks[method], carried, rounds[method]) for method in options.methods}
        yield mbit, {"carried": carried, "methods": by_method}


def _count(expected: tuple[float, float], mbit: int, every: int, turn: int, budget: float) -> int:
    """Steps of a method in a turn: whole rounds, as many as the budget has time for, and one round at least in all."""
    seconds, sent = expected
    a_step = seconds + (8 * sent / (mbit * 1e6) if mbit else 0)
    steps = max(1, min(MOST, int(budget / a_step)))
    if steps < TURNS * every:  # a round in each turn, or a round in all
        return every if turn == 0 or steps > every else 0
    return steps // TURNS // every * every


def summary(blocks: list[dict[str, Any]], carried: float | None, every: int) -> Results:
    """Seconds a step: the median of steps, or of rounds of several steps."""
    seconds = [s for each in blocks for s in each["seconds"]]
    rounds = [fmean(seconds[at : at + every]) for at in range(0, len(seconds), every)]
    up, down = (sum(b[way] * len(b["seconds"]) for b in blocks) / len(seconds) for way in ("up", "down"))
    found: Results = {
        "seconds": median(rounds), "bytes_up": up, "bytes_down": down, "steps": len(seconds),
        "by_round": [round(each, 4) for each in rounds],
    }  # fmt: skip
    if carried:
        stepping = fmean(s for each in blocks for s in each["stepping"])
        found["link_use"] = up / fmean(seconds) / carried
        found["link_use_in_optimizer"] = up / stepping / carried  # of votes, whose bytes all travel there
    return found


def measure_ends(
    network: Network, crew: Crew, results: Results, options: argparse.Namespace
) -> Iterator[Results]:
    """Whole runs to the target on each link, beside the product of steps and seconds a step."""
    for mbit in options.links:
        for method in options.methods:
            setting = chosen(results["curves"], method)
            if setting is None:
                continue
            network.shape(mbit)
            goal = GOALS[options.goal]
            found = curve(crew, goal, method, setting, SEEDS[0], results["target"], goal.patience)
            network.shape(0)
            steps = found["curve"][-1][0]
            product = steps * results["links"][str(mbit)]["methods"][method]["seconds"]
            yield {
                "link": mbit,
                "method": method,
                "steps": steps,
                "seconds": found["seconds"],
                "product": product,
            }


def name_of(mbit: int) -> str:
    return f"{mbit} Mbit/s" if mbit else "not shaped"


def table_of(results: Results) -> Table:
    links = sorted(results["links"], key=lambda mbit: int(mbit) or 10**9)
    table = Table(title=f"Seconds a step / to {results.get('target')}")
    table.add_column("method")
    for heading in ("kB up a step", "setting", "steps", *(name_of(int(mbit)) for mbit in links)):
        table.add_column(heading, justify="right")
    curves = results.get("curves", [])
    for method in METHODS:
        here = {
            m: results["links"][m]["methods"][method]
            for m in links
            if method in results["links"][m]["methods"]
        }
        steps = steps_to_target(curves, SPEED_ONLY.get(method, method))
        setting = chosen(curves, SPEED_ONLY.get(method, method)) or {}
        cells = []
        for mbit in links:
            seconds = here[mbit]["seconds"] if mbit in here else None
            to_target = f" / {seconds * steps[0]:,.0f}" if seconds and steps else ""
            cells.append(f"{seconds:.3f}{to_target}" if seconds else "")
        sent = f"{fmean(h['bytes_up'] for h in here.values()) / 1e3:,.0f}" if here else ""
        reached = f"{steps[0]:g} ({steps[1]}-{steps[2]})" if steps else ""
        table.add_row(method, sent, " ".join(f"{k} {v:g}" for k, v in setting.items()), reached, *cells)
    return table


def measure(
    network: Network, crew: Crew, results: Results, options: argparse.Namespace, progress: Progress
) -> None:
    """The parts that were asked for; results are written as they come."""

    def write() -> None:
        options.out.write_text(json.dumps(results, indent=1))

    curves = results.setdefault("curves", [])
    links = results.setdefault("links", {})
    if "targets" in options.parts:
        results["target"] = options.target
        network.shape(0)
        for method in [m for m in options.methods if m not in SPEED_ONLY]:
            curves[:] = [each for each in curves if each["method"] != method]
            goal = GOALS[options.goal]
            for found in curves_of(crew, goal, options.goal, method, options.target, progress):
                curves.append(found)
                write()
    if "links" in options.parts:
        for mbit, found in measure_links(network, crew, options.goal, curves, options, progress):
            before = links.get(str(mbit), {}).get("methods", {})
            links[str(mbit)] = {**found, "methods": before | found["methods"]}
            write()
    if "ends" in options.parts:
        for found in measure_ends(network, crew, results, options):
            same = [
                each
                for each in results.get("ends", [])
                if (each["link"], each["method"]) == (found["link"], found["method"])
            ]
            results["ends"] = [each for each in results.get("ends", []) if each not in same] + [found]
            write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--goal", default="mnist", choices=list(GOALS))
    parser.add_argument("--links", nargs="+", type=int, default=[0, 1000, 100, 10, 1], help="Mbit/s; 0: any")
    parser.add_argument(
        "--methods", nargs="+", default=[m for m in METHODS if m not in SPEED_ONLY], choices=list(METHODS)
    )
    parser.add_argument(
        "--parts", nargs="+", default=["targets", "links"], choices=["targets", "links", "ends"]
    )
    parser.add_argument("--seconds", type=float, default=100.0, help="at most, about, per method and link")
    parser.add_argument("--target", type=float, help="accuracy or loss to reach")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # of a host that this starts
    options = parser.parse_args()
    if options.rank is not None:
        serve(options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is torn down
    goal = GOALS[options.goal]
    options.target = options.target or goal.target
    options.out = options.out or FOLDER / f"{options.goal}.json"
    data = ["--data-dir", str(options.data_dir.absolute())] if options.data_dir else []
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    settings = {method: len(settings_of(options.goal, method)) for method in GRIDS[options.goal]}
    results |= {"hosts": HOSTS, "goal": options.goal, "task": goal.task, "batch": goal.batch,
                "settings": settings, "cores": os.cpu_count(), "torch": torch.__version__}  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with hosts(["--goal", options.goal, *data]) as (network, crew), Progress() as progress:
            measure(network, crew, results, options, progress)
    except Refused as why:
        sys.exit(f"No network of namespaces here: {why}\nThis needs Linux, iproute2 and root.")
    except KeyboardInterrupt:
        sys.exit(130)
    Console(width=160).print(table_of(results))


if __name__ == "__main__":
    main()
