"""More mutated ballots than `make test` has time for."""

from __future__ import annotations

from tests.test_ballot import test_mutated_ballots as mutated_ballots


def test_a_million_mutated_ballots() -> None:
    mutated_ballots(1_000_000)
