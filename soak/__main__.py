"""Plays faults over all engines, and writes the table.

python -m soak --minutes 30 --seed 1                       everything; writes soak/RESULT.md
python -m soak --minutes 2 --only ddp-kills core-stops     some scenarios; writes nothing
python -m soak --list                                      the scenarios
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from soak.driver import Outcome, play_all, play_once, told
from soak.scenarios import SCENARIOS
from soak.table import markdown

RESULT = Path(__file__).with_name("RESULT.md")


def main() -> None:
    options = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    if options.list:
        for scenario in SCENARIOS.values():
            print(f"{scenario.name:25} {scenario.engine}: {scenario.fault}")
        return
    scenarios = [SCENARIOS[name] for name in options.only or SCENARIOS]
    seconds = 60 * options.minutes
    if options.episode is None:
        outcomes = play_all(scenarios, seed=options.seed, seconds=seconds)
    else:
        outcomes = [Outcome(scenario=scenario) for scenario in scenarios]
        for outcome in outcomes:
            play_once(outcome, seed=options.seed, number=options.episode, seconds=seconds)
            print(told(outcome))
    page = markdown(outcomes, seed=options.seed, minutes=options.minutes)
    print(page)
    if not options.only:
        RESULT.write_text(page)
    sys.exit(not all(outcome.is_good for outcome in outcomes))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="for all scenarios together")
    parser.add_argument("--seed", type=int, default=1, help="decides all faults and their order")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, metavar="NAME", help="these scenarios alone")
    parser.add_argument("--episode", type=int, help="this episode of them alone, as after a failure")
    parser.add_argument("--list", action="store_true", help="list the scenarios")
    return parser.parse_args()


if __name__ == "__main__":
    main()
