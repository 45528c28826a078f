"""Seconds per step, and to an accuracy, of DDP, its hooks and the optimizer: four hosts, links of several speeds.

    python -m benchmarks.network                              # about an hour; as root, on Linux
    python -m benchmarks.network --links 100 --parts links    # one link speed alone, in minutes
    python -m benchmarks.network --model large --links 0 --parts links --out large.json

Every host is a network namespace, joined to the others by a bridge in another one; each end of each link is
shaped by tbf, so a host has the given speed up and down (0: not shaped). One process per host trains an MLP of
5.5 million parameters, or of 25 million, on MNIST with DDP over gloo, one thread each, all on this machine's cores.
Methods take turns, a few steps each, so a busy machine slows all of them. Bytes are the interface's, headers among
them; packets that the kernel sends in one go count as one header.

`weighted` and `majority` are rules of the hook. `vote` and `vote-overlap` are the optimizer with rule `weighted`.
Their accuracy by step is that of the hook, whose votes are the same.

Accuracy by step does not depend on the link: it is measured once, not shaped, with the learning rate of a small
search. Seconds to an accuracy are steps x seconds per step. Writes benchmarks/network/results.json; a part or a
link that is measured again replaces what was there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryFile
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.network_methods import BATCH, CURVES, HOSTS, RATES, SGD_RATES, WIDTHS, Host

WARMUP, TURNS, MOST = 3, 3, 10  # steps before anything counts; turns of each method; its steps in a turn
EVERY, PATIENCE = 10, 400  # steps between evaluations; after so many a run is given up
SEEDS = (0, 1, 2)
OUT = Path(__file__).with_suffix("") / "results.json"


def serve(options: argparse.Namespace) -> None:
    """Do what comes in as lines of JSON, and answer with one each, until there are no more."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed is no reply
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=options.rank, world_size=HOSTS, timeout=timedelta(minutes=10))
    host = Host(options.rank, options.task, options.data_dir, WIDTHS[options.model])
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        replies.write(json.dumps(getattr(host, what)(*arguments)) + "\n")
    dist.destroy_process_group()


class Refused(Exception):
    """Why this machine cannot run the benchmark."""


def run(*command: str) -> None:
    """Run a command; say what it said if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


class Network:
    """Namespaces of the hosts and of the bridge between them; eth0 of host r has 10.77.0.(r+1)."""

    def __init__(self) -> None:
        self.names = [f"signvote-{os.getpid()}-{r}" for r in range(HOSTS)]
        self.bridge = f"signvote-{os.getpid()}-bridge"

    def build(self) -> None:
        """Make them."""
        for name in (self.bridge, *self.names):
            run("ip", "netns", "add", name)
        run("ip", "-n", self.bridge, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", self.bridge, "link", "set", "bridge", "up")
        for rank, name in enumerate(self.names):
            port = f"port{rank}"
            peer = ("peer", "name", port, "netns", self.bridge)
            run("ip", "-n", name, "link", "add", "eth0", "type", "veth", *peer)
            run("ip", "-n", name, "address", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run("ip", "-n", name, "link", "set", device, "up")
            run("ip", "-n", self.bridge, "link", "set", port, "master", "bridge", "up")

    def shape(self, mbit: int) -> None:
        """The speed of every link, up and down; 0: as fast as it goes."""
        burst = max(mbit * 10**6 // 8 // 250, 16_000 if mbit <= 10 else 64_000)  # bytes, 4 ms of the rate
        how = f"tbf rate {mbit}mbit burst {burst} latency 100ms" if mbit else "noqueue"
        ports = [(self.bridge, f"port{rank}") for rank in range(HOSTS)]
        for name, device in (*((name, "eth0") for name in self.names), *ports):
            run("tc", "-n", name, "qdisc", "replace", "dev", device, "root", *how.split())

    def tear_down(self) -> None:
        """Remove what there is."""
        for name in (*self.names, self.bridge):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


class Crew:
    """A process on each host, told what to do."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self.errors = [TemporaryFile("w+") for _ in range(HOSTS)]  # noqa: SIM115

    def start(self, network: Network, arguments: list[str]) -> None:
        """Start them."""
        local = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
        for rank, name in enumerate(network.names):
            command = [sys.executable, "-m", "benchmarks.network", "--rank", str(rank), *arguments]
            process = subprocess.Popen(
                ["ip", "netns", "exec", name, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=self.errors[rank], text=True, env={**os.environ, **local}, start_new_session=True,
            )  # fmt: skip
            self.processes.append(process)

    def all(self, *command: object) -> list[Any]:
        """Tell all hosts the same; their replies."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
        return [self._reply(rank) for rank in range(len(self.processes))]

    def _reply(self, rank: int) -> Any:
        stdout = self.processes[rank].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            time.sleep(1)  # for the others to say what happened to them
            for file in self.errors:
                file.seek(0)
            said = (f"host {r}: {file.read()[-1500:]}" for r, file in enumerate(self.errors))
            raise RuntimeError(f"host {rank} is gone. They said:\n" + "\n".join(said))
        return json.loads(line)

    def stop(self) -> None:
        """End them."""
        for process in self.processes:
            process.kill()
            process.wait()


@contextmanager
def hosts(arguments: list[str]) -> Iterator[tuple[Network, Crew]]:
    """The network and its processes; nothing of them is left afterwards."""
    if missing := [program for program in ("ip", "tc") if shutil.which(program) is None]:
        raise Refused(f"`{missing[0]}` is missing; install iproute2")
    network, crew = Network(), Crew()
    try:
        network.build()
        crew.start(network, arguments)
        yield network, crew
    finally:
        crew.stop()
        network.tear_down()


def block(crew: Crew, method: str, count: int) -> dict[str, Any]:
    """Some steps: seconds of each and bytes of one, up and down, means of the hosts."""
    replies = crew.all("train", method, count)
    seconds = [fmean(of_step) for of_step in zip(*(r["seconds"] for r in replies), strict=True)]
    up, down = (fmean(r[way] for r in replies) / count for way in ("up", "down"))
    return {"seconds": seconds, "up": up, "down": down}


def measure_links(
    network: Network, crew: Crew, methods: list[str], links: list[int], budget: float, progress: Progress
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each link speed, with what every method took there."""
    network.shape(0)
    first = {}
    for method in progress.track(methods, description="warming up"):
        crew.all("make", method, (RATES[CURVES.get(method, method)] or SGD_RATES)[0], 0)
        block(crew, method, WARMUP)
        first[method] = block(crew, method, 2)
    for mbit in links:
        network.shape(mbit)
        blocks: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
        turns = [(turn, method) for turn in range(TURNS) for method in methods]
        for _, method in progress.track(turns, description=name_of(mbit)):
            seen = first[method]
            expected = seen["seconds"][1] + (8 * seen["up"] / (mbit * 1e6) if mbit else 0)
            count = max(1, min(MOST, int(budget / TURNS / expected)))
            blocks[method].append(block(crew, method, count))
        yield mbit, {method: summary(of_method, mbit) for method, of_method in blocks.items()}


def summary(blocks: list[dict[str, Any]], mbit: int) -> dict[str, Any]:
    seconds = [s for each in blocks for s in each["seconds"]]
    up, down = (sum(b[way] * len(b["seconds"]) for b in blocks) / len(seconds) for way in ("up", "down"))
    use = 8 * up / fmean(seconds) / (mbit * 1e6) if mbit else None  # of the link, over the whole step
    return {"seconds": median(seconds), "bytes_up": up, "bytes_down": down, "link_use": use, "steps": seconds}


def measure_curve(
    crew: Crew, method: str, rate: float, seed: int, target: float, patience: int
) -> dict[str, Any]:
    """Accuracy by step, until two evaluations in a row reach the target; the step of the first of them."""
    crew.all("make", method, rate, seed)
    curve, reached = list[tuple[int, float]](), None
    for step in range(EVERY, patience + 1, EVERY):
        crew.all("train", method, EVERY)
        curve.append((step, crew.all("accuracy", method)[0]))
        if len(curve) > 1 and min(accuracy for _, accuracy in curve[-2:]) >= target:
            reached = curve[-2][0]
            break
    return {"method": method, "rate": rate, "seed": seed, "reached": reached, "curve": curve}


def measure_curves(
    network: Network, crew: Crew, methods: list[str], target: float, progress: Progress
) -> Iterator[list[dict[str, Any]]]:
    """Of each method: its learning rates with the first seed, a rate given up once another was faster;
    then the best of them with the other seeds.
    """
    network.shape(0)
    for method in progress.track([m for m in methods if RATES[m]], description="accuracy by step"):
        runs, best, fastest = list[dict[str, Any]](), RATES[method][0], PATIENCE
        for rate in RATES[method]:
            runs.append(measure_curve(crew, method, rate, SEEDS[0], target, fastest + EVERY))
            reached = runs[-1]["reached"]
            if reached is not None and reached <= fastest:
                best, fastest = rate, reached
        yield runs + [measure_curve(crew, method, best, seed, target, PATIENCE) for seed in SEEDS[1:]]


def steps_to_target(results: dict[str, Any], method: str) -> tuple[float, float] | None:
    """(learning rate, steps): the median of the seeds at the rate that all of them ran."""
    by_rate: dict[float, list[Any]] = {}
    for each in results.get("curves", []):
        if each["method"] == method:
            by_rate.setdefault(each["rate"], []).append(each["reached"])
    for rate, reached in by_rate.items():
        if len(reached) == len(SEEDS) and None not in reached:
            return rate, median(reached)
    return None


def name_of(mbit: int) -> str:
    return f"{mbit} Mbit/s" if mbit else "not shaped"


def table_of(results: dict[str, Any]) -> Table:
    links = sorted(results["links"], key=lambda mbit: int(mbit) or 10**9)
    table = Table(title="Seconds per step / to the accuracy")
    table.add_column("method")
    for heading in ("kB up a step", "rate", "steps", *(name_of(int(mbit)) for mbit in links)):
        table.add_column(heading, justify="right")
    for method in RATES:
        here = {mbit: results["links"][mbit][method] for mbit in links if method in results["links"][mbit]}
        goal = steps_to_target(results, CURVES.get(method, method))
        cells = []
        for mbit in links:
            seconds = here[mbit]["seconds"] if mbit in here else None
            to_target = f" / {seconds * goal[1]:,.0f}" if seconds and goal else ""
            cells.append(f"{seconds:.3f}{to_target}" if seconds else "")
        sent = f"{fmean(h['bytes_up'] for h in here.values()) / 1e3:,.0f}" if here else ""
        table.add_row(method, sent, *(f"{g:g}" for g in goal or ()), *([] if goal else ["", ""]), *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", nargs="+", type=int, default=[0, 1000, 100, 10], help="Mbit/s; 0: any")
    parser.add_argument("--methods", nargs="+", default=list(RATES), choices=list(RATES))
    parser.add_argument("--parts", nargs="+", default=["links", "curves"], choices=["links", "curves"])
    parser.add_argument("--seconds", type=float, default=100.0, help="at most, about, per method and link")
    parser.add_argument("--target", type=float, default=0.94, help="accuracy to reach")
    parser.add_argument("--model", default="small", choices=list(WIDTHS))
    parser.add_argument("--task", default="mnist-10k")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # of a host that this starts
    options = parser.parse_args()
    if options.rank is not None:
        serve(options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is torn down
    chosen = ["--task", options.task, "--model", options.model]
    data = ["--data-dir", str(options.data_dir.absolute())] if options.data_dir else []
    results = json.loads(options.out.read_text()) if options.out.exists() else {"links": {}}
    results |= {"hosts": HOSTS, "widths": WIDTHS[options.model], "batch": BATCH, "cores": os.cpu_count(),
                "task": options.task, "torch": torch.__version__}  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with hosts([*chosen, *data]) as (network, crew), Progress() as progress:
            parts = network, crew, options.methods
            if "links" in options.parts:
                for mbit, by_method in measure_links(*parts, options.links, options.seconds, progress):
                    results["links"][str(mbit)] = results["links"].get(str(mbit), {}) | by_method
                    options.out.write_text(json.dumps(results, indent=1))
            if "curves" in options.parts:
                for curves in measure_curves(*parts, options.target, progress):
                    kept = [c for c in results.get("curves", []) if c["method"] != curves[0]["method"]]
                    results |= {"target": options.target, "curves": kept + curves}
                    options.out.write_text(json.dumps(results, indent=1))
    except Refused as why:
        sys.exit(f"No network of namespaces here: {why}\nThis needs Linux, iproute2 and root.")
    except KeyboardInterrupt:
        sys.exit(130)
    Console(width=130).print(table_of(results))


if __name__ == "__main__":
    main()
