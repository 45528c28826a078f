"""docs/reliability.md: every test and every scenario of the soak that the page names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "reliability.md").read_text()
TESTS = {
    name
    for path in (ROOT / "tests").glob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
}
SCENARIOS = set(re.findall(r'Scenario\("([\w-]+)"', (ROOT / "soak" / "scenarios.py").read_text()))
ROWS = [line.split(" | ") for line in PAGE.splitlines() if re.match(r"\| (?!fault|attack|load|-)", line)]


def test_the_page_has_its_rows_and_each_says_how_it_is_tested() -> None:
    assert len(ROWS) >= 48
    for row in ROWS:
        assert len(row) == 4, row
        assert re.search(r"`test_\w+`|`soak: [\w-]+`|\]\(", row[2]), row[0]


def test_every_test_that_is_named_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert named <= TESTS, named - TESTS


def test_every_scenario_is_named_and_exists() -> None:
    named = set(re.findall(r"`soak: ([\w-]+)`", PAGE))
    assert named == SCENARIOS, named ^ SCENARIOS


def test_the_readme_of_the_soak_explains_every_scenario() -> None:
    readme = (ROOT / "soak" / "README.md").read_text()
    explained = set(re.findall(r"^\| `([\w-]+)` \|", readme, re.MULTILINE))
    assert explained == SCENARIOS, explained ^ SCENARIOS
