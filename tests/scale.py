"""Bytes of a round as functions of its size: the formulas of docs/scale.md. N coordinates, dense ballots.

`python -m tests.scale` prints the tables of that page that are computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

HEADER = 64  # of a ballot
ENVELOPE = 52  # of a message between servers
LENGTH = 8  # before each of its arrays


class Traffic(NamedTuple):
    """Bytes through one machine in a round."""

    received: int
    sent: int


# ---- messages ----------------------------------------------------------------------------------------


def packed(n: int) -> int:
    """One bit a coordinate."""
    return -(-n // 8)


def ballot(n: int) -> int:
    """A worker's ballot, and a decision."""
    return HEADER + packed(n)


def planes(weights: Iterable[int]) -> int:
    """The binary digits that the sum of votes of these weights needs."""
    sizes = [abs(weight) for weight in weights]
    common = reduce(or_, sizes)
    lowest = (common & -common).bit_length() - 1
    return (sum(sizes) >> lowest).bit_length()


def message(*arrays: int) -> int:
    """A message between servers, from the bytes of its arrays."""
    return ENVELOPE + sum(LENGTH + size for size in arrays)


def roll(workers: int) -> int:
    """Up: who votes."""
    return message(8 * workers, 4 * workers, workers, 0, 0, 0, 2)


def weights(workers: int) -> int:
    """Down: their weights."""
    return message(8 * workers, 4 * workers)


def partial(workers: int, n: int, digits: int) -> int:
    """Up: who is counted, and the tally."""
    return message(8 * workers, message(8, 1, digits * packed(n)))


def verdict(n: int) -> int:
    """Down: the decision, where no vote is tied; a tie costs what a sparse ballot does."""
    return message(ballot(n), 0, 0)


def evidence(workers: int) -> int:
    """Up: two counts for each worker."""
    return message(8 * workers, 8 * workers, 8 * workers, 8, 0, 0)


# ---- machines ----------------------------------------------------------------------------------------


def worker(n: int) -> Traffic:
    """A worker, wherever it is."""
    return Traffic(received=ballot(n), sent=ballot(n))


def server(n: int, workers: int) -> Traffic:
    """A server, or the workers' side of a relay."""
    return Traffic(received=workers * ballot(n), sent=workers * ballot(n))


def rank(n: int, ranks: int) -> Traffic:
    """A rank of torch.distributed, which is a worker and decides a share of the coordinates, without headers."""
    others = 2 * packed(n) * (ranks - 1) // ranks
    return Traffic(received=others, sent=others)


def link(n: int, workers: int, digits: int) -> Traffic:
    """Between a relay with these workers below it and the server above it, seen from above."""
    up = roll(workers) + partial(workers, n, digits) + evidence(workers)
    return Traffic(received=up, sent=weights(workers) + verdict(n))


def tree(n: int, shape: Sequence[int]) -> list[Traffic]:
    """The root, a server of each level below it, and the last, which has the workers. Weights are equal.

    Args:
        n: coordinates.
        shape: how many each server has below it, from the root down; (4, 16): 4 relays with 16 workers each.

    """
    found = []
    above = Traffic(0, 0)
    below = reduce(lambda a, b: a * b, shape)
    for level, children in enumerate(shape):
        below //= children
        if level == len(shape) - 1:
            under = server(n, children)
        else:
            each = link(n, below, planes([1] * below))
            under = Traffic(children * each.received, children * each.sent)
        found.append(Traffic(under.received + above.sent, under.sent + above.received))
        if level < len(shape) - 1:
            above = each
    return found


# ---- memory and processor ----------------------------------------------------------------------------

CHUNK = 4 * 2**20  # bytes: votes of a chunk, when evidence is counted
BUFFERS = 14_000_000  # bytes of a server, 7 for each coordinate of a small model
COPIES_OF_WORKER = 180  # six of the gradient, which is as long as 32 planes


def memory_of_server(n: int, workers: int, digits: int) -> int:
    """Ballots, the tally, some planes for the decision, and buffers."""
    return workers * ballot(n) + (digits + 4) * packed(n) + min(7 * n, BUFFERS)


def memory_of_relay(n: int, workers: int, digits: int) -> int:
    """Ballots, the tally and the message made of it, and both again in a root that is in the same process."""
    return workers * ballot(n) + 6 * digits * packed(n) + CHUNK


def memory_of_worker(n: int) -> int:
    """Beyond parameters and gradients: momentum, the gradients in one vector, and the ballot."""
    return 8 * n + 4 * packed(n)


def copies_of_server(workers: int) -> int:
    """Processor time of a round, in that of copying one plane."""
    return 32 * workers + 850


def copies_of_relay(workers: int) -> int:
    """See `copies_of_server`."""
    return 50 * workers + 800


# ---- the page ----------------------------------------------------------------------------------------


def amount(size: float) -> str:
    """Bytes as a person reads them."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{size:.3g} {unit}"
        size /= 1000
    raise AssertionError


def time(size: float, gigabits: float) -> str:
    """Seconds on a link of so many Gbit/s."""
    seconds = 8 * size / gigabits / 1e9
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def table(rows: Iterable[tuple[str, Traffic, float]]) -> list[str]:
    """Bytes and seconds of machines: the name, the traffic, and Gbit/s each way."""
    lines = ["| machine | receives | sends | on a link of | takes |", "|---|---|---|---|---|"]
    for name, traffic, speed in rows:
        seconds = time(max(traffic), speed)
        cells = (name, amount(traffic.received), amount(traffic.sent), f"{speed:g} Gbit/s", seconds)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def measurements(found: Sequence[dict[str, Any]]) -> list[str]:
    """A row for each size and machine of benchmarks/scale/sizes.json and predicted.json."""
    lines = [
        "| workers | N | machine | planes copied, model | measured | off | memory, model | peak | off | as it is |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        n, workers, below = row["n"], row["workers"], row["below"]
        digits = row["relay"]["planes"]
        models = {
            "server": (workers, copies_of_server(workers), memory_of_server(n, workers, digits)),
            "relay": (below, copies_of_relay(below), memory_of_relay(n, below, digits)),
            "worker": (1, COPIES_OF_WORKER, memory_of_worker(n)),
        }
        ballots_of = {"server": workers, "relay": below, "worker": 32}
        for case, (count, copies, memory) in models.items():
            found_copies = row[case]["copies"] + row[case].get("copies of the step", 0)
            measured = found_copies * ballots_of[case]
            peak, as_it_is = row[case]["peak if freed blocks are returned"], row[case]["peak"]
            cells = (
                f"{count:,}",
                f"{n:,}",
                case,
                f"{copies:,}",
                f"{measured:,.0f}",
                f"{measured / copies - 1:+.0%}",
                amount(memory),
                amount(peak),
                f"{peak / memory - 1:+.0%}",
                amount(as_it_is),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return lines


PHONES = 10_000_000  # coordinates
CENTERS = 70_000_000_000


def tables() -> list[list[str]]:
    """Those of docs/scale.md."""
    root, first, second = tree(PHONES, (10, 100, 1000))
    top, relay = tree(CENTERS, (8, 8))
    phones = [
        ("one server for all", server(PHONES, 1_000_000), 100),
        ("the root of a tree", root, 10),
        ("each of its 10 relays", first, 10),
        ("each of the 1,000 relays below them", second, 10),
        ("a phone", worker(PHONES), 0.01),
    ]
    centers = [
        ("one server for all", server(CENTERS, 64), 100),
        ("the root of a tree", top, 100),
        ("each of its 8 relays", relay, 100),
        ("a data center below it", worker(CENTERS), 100),
        ("a rank of torch.distributed", rank(CENTERS, 64), 100),
    ]
    return [table(phones), table(centers)]


if __name__ == "__main__":
    print("\n\n".join("\n".join(rows) for rows in tables()))
