"""More mutated ballots than `make test` has time for."""

from __future__ import annotations

from tests.test_ballot import check_mutated_ballots


def test_a_million_mutated_ballots() -> None:
    check_mutated_ballots(1_000_000)
