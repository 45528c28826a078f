"""What is known about an exchange that failed, in sentences: who is alive, and whose connections broke.

Gloo's errors hold the address of the other end, if a connection broke, and nothing, if nothing came in time. So every
rank leaves its addresses in the store when it starts, and its error when an exchange fails.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence

ENDPOINT = re.compile(r"\[([0-9a-fA-F.:]+)\]:\d+")  # as gloo writes it: [10.0.0.7]:29500
TIMED_OUT = re.compile("timed? ?out", re.IGNORECASE)


def account(
    stage: str,
    mine: int,
    reports: Mapping[int, str],
    ranks: Sequence[int],
    addresses: Mapping[int, Sequence[str]],
) -> str:
    """The text of an error.

    Args:
        stage: the round that failed.
        mine: the rank that raises the error, by its place in the group.
        reports: the errors of the ranks that are alive, this one among them.
        ranks: the names of all ranks.
        addresses: of the machine of each rank, as far as they are known.

    """
    sentences = [f"{stage} failed on rank {ranks[mine]}: {reports[mine]}"]
    alive = []
    for r, error in reports.items():
        if r != mine:
            alive.append(f"rank {ranks[r]} is alive and reports: {error}")
    if alive:
        sentences.append("; ".join(alive))
    sentences += _connections(reports, ranks, addresses)
    silent = [str(rank) for r, rank in enumerate(ranks) if r not in reports]
    if silent:
        names = ", ".join(silent)
        sentences.append(f"no report from rank {names}: dead, cut off, or still computing")
    return ". ".join(sentences)


def _connections(
    reports: Mapping[int, str],
    ranks: Sequence[int],
    addresses: Mapping[int, Sequence[str]],
) -> list[str]:
    """What the errors show about connections; nothing if they show nothing."""
    endpoints = {}
    timed_out = []
    for r, error in reports.items():
        found = ENDPOINT.search(error)
        if found:
            endpoints[r] = found
        elif TIMED_OUT.search(error):
            timed_out.append(str(ranks[r]))
    lost = []
    for r, endpoint in endpoints.items():
        address = endpoint[1]
        others = [s for s in endpoints if endpoints[s][0] == endpoint[0]]  # that lost the same rank
        there = []
        for s, its_addresses in addresses.items():
            if s not in others and address in its_addresses:
                there.append(str(ranks[s]))
        owner = f"rank {' or '.join(there)} at {address}" if there else address
        lost.append(f"rank {ranks[r]} lost its connection to {owner}")
    sentences = []
    if lost:
        sentences.append("; ".join(lost))
    if timed_out:
        names = ", ".join(timed_out)
        sentences.append(f"rank {names} waited in vain for another rank")
    if sentences and len(reports) == len(ranks):
        sentences.append("Every rank is alive: look for a link between them that is cut or too slow")
    return sentences


def local_addresses() -> list[str]:
    """The addresses of this machine by which other ranks may know it."""
    found = {"127.0.0.1", "::1"}
    try:
        names = socket.getaddrinfo(socket.gethostname(), None)
        found |= {str(entry[4][0]) for entry in names}
    except OSError:  # a machine may not know its own name
        pass
    master = os.environ.get("MASTER_ADDR")
    if master:
        found |= _towards(master)
    return sorted(found)


def _towards(host: str) -> set[str]:
    """The address from which packets to a host would leave; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return {probe.getsockname()[0]}
    except OSError:
        return set()


def plain(error: str) -> str:
    """Gloo's error without its source file and its advice: `Connection closed by peer [10.0.0.7]:29500`."""
    text = re.sub(r"^\[\S+:\d+\] ", "", error.strip())
    before_advice, _, _ = text.partition(". This is typically caused by")
    return before_advice.rstrip(".")
