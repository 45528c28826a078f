"""`signvote` with checkpoints more often than every 30 seconds; a file grows by a byte with each round.

python -m soak.command COUNTER SECONDS train --rounds 100 ...
"""

from __future__ import annotations

import os
import sys

from signvote.cli import main as signvote
from signvote.sim import loop
from signvote.sim.run import Run


def main() -> None:
    counter, seconds, *arguments = sys.argv[1:]
    loop.SECONDS_BETWEEN_CHECKPOINTS = float(seconds)
    file = os.open(counter, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    step = Run.step

    def counted(run: Run) -> None:
        step(run)
        os.write(file, b".")

    Run.step = counted  # type: ignore[method-assign, assignment]
    sys.argv = ["signvote", *arguments]
    signvote()


if __name__ == "__main__":
    main()
