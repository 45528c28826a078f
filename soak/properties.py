"""The property tests of `make test`, with other and more examples."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from soak.driver import Episode, Stage

FILES = ("tests/test_ballot.py", "tests/test_kernels.py")
MOST_SECONDS = 300


def random_inputs(stage: Stage) -> Episode:
    """Each property of one file must hold for every example: 2,000, by the profile `soak` in tests/conftest.py."""
    seed = stage.chance.randrange(2**31)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--hypothesis-seed={seed}"]
    command += ["-k", "not mutated", "--hypothesis-show-statistics", stage.chance.choice(FILES)]
    environment = os.environ | {"HYPOTHESIS_PROFILE": "soak"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"the property tests take longer than {MOST_SECONDS} s here", flush=True)
        return Episode(injected=0, survived=0)
    counts = re.findall(r"(\d+) passing, (\d+) failing", done.stdout)
    examples = sum(int(passing) for passing, _ in counts)
    failing = sum(int(failed) for _, failed in counts)
    if done.returncode:
        print(done.stdout[-5000:])
        failing = max(1, failing)
    return Episode(injected=examples + failing, survived=examples)
