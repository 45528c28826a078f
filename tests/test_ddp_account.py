"""The error of a failed exchange says what is known: who is alive, whose connection broke, who waited in vain."""

from __future__ import annotations

import socket

import pytest

from signvote.engines.ddp.account import account, local_addresses, plain

ADDRESSES = {0: ["10.0.0.5"], 1: ["10.0.0.6", "127.0.0.1"], 2: ["10.0.0.7"], 3: ["10.0.0.7"]}
LOST = "Connection closed by peer [{}]:29500"
TIMEOUT = "Timed out waiting 300000ms for recv operation to complete"


def test_a_cut_link_names_both_ends() -> None:
    reports = {0: LOST.format("10.0.0.6"), 1: LOST.format("10.0.0.5"), 2: LOST.format("10.0.0.6")}
    text = account("round 9", 0, reports, [0, 1, 4], {**ADDRESSES, 3: []})
    assert text == (
        "round 9 failed on rank 0: Connection closed by peer [10.0.0.6]:29500."
        " rank 1 is alive and reports: Connection closed by peer [10.0.0.5]:29500;"
        " rank 4 is alive and reports: Connection closed by peer [10.0.0.6]:29500."
        " rank 0 lost its connection to rank 1 at 10.0.0.6; rank 1 lost its connection to rank 0 at 10.0.0.5;"
        " rank 4 lost its connection to rank 1 at 10.0.0.6."
        " Every rank is alive: look for a link between them that is cut or too slow"
    )


def test_ranks_that_waited_in_vain() -> None:
    text = account("round 9", 2, {0: TIMEOUT, 2: TIMEOUT, 1: LOST.format("10.0.0.5")}, [0, 1, 2], ADDRESSES)
    assert (
        "rank 1 lost its connection to rank 0 at 10.0.0.5. rank 0, 2 waited in vain for another rank" in text
    )
    assert text.endswith("Every rank is alive: look for a link between them that is cut or too slow")


def test_two_ranks_on_one_machine_and_an_address_of_nobody() -> None:
    reports = {0: LOST.format("10.0.0.7"), 1: LOST.format("10.9.9.9")}
    text = account("round 9", 1, reports, [0, 1, 2, 3], ADDRESSES)
    assert (
        "rank 0 lost its connection to rank 2 or 3 at 10.0.0.7; rank 1 lost its connection to 10.9.9.9."
        in text
    )
    assert text.endswith("no report from rank 2, 3: dead, cut off, or still computing")
    assert "Every rank is alive" not in text


def test_an_error_that_shows_nothing_about_connections() -> None:
    assert account("round 9", 0, {0: "a", 1: "b"}, [0, 1], {}) == (
        "round 9 failed on rank 0: a. rank 1 is alive and reports: b"
    )


def test_gloos_error_without_its_file_and_advice() -> None:
    where, advice = "[../gloo/transport/tcp/pair.cc:538] ", ". This is typically caused by x"
    text = where + "Connection closed by peer [10.0.0.7]:29500" + advice
    assert plain(text) == "Connection closed by peer [10.0.0.7]:29500"


def test_the_addresses_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert "127.0.0.1" in local_addresses()
    monkeypatch.setenv("MASTER_ADDR", "no such host")

    def unknown(*args: object) -> None:
        raise OSError("no name")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert local_addresses() == ["127.0.0.1", "::1"]
