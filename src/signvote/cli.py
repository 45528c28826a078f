"""The command line: `signvote COMMAND`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional, subcommand

from signvote import __version__
from signvote.errors import SignVoteError


@dataclass(frozen=True, kw_only=True)
class BenchKernels:
    """Time every kernel as a ratio to copying the float32 vector in the same run.

    Prints a table and writes JSON: pack, votes, trust, steps, beside the textbook way in torch;
    one thread and all, several numbers of workers, and at growing sizes to show that cost is linear.
    """

    what: Positional[Literal["kernels"]] = "kernels"
    """What to time."""
    coordinates: int = 25_000_000
    """N, the length of the vector."""
    workers: tuple[int, ...] = (15, 100)
    """M, the numbers of workers."""
    threads: tuple[int, ...] = ()
    """Numbers of threads; default: 1 and all."""
    repeats: int = 5
    """Runs of each; the fastest counts."""
    out: Path = Path("bench.json")
    """Where the JSON goes."""

    def run(self) -> None:
        """Do it."""
        from signvote import bench

        bench.kernels(self.coordinates, self.workers, self.threads, self.repeats, self.out)


@dataclass(frozen=True, kw_only=True)
class Version:
    """Print the version."""

    def run(self) -> None:
        """Do it."""
        print(__version__)  # noqa: T201


Command = Annotated[BenchKernels, subcommand("bench")] | Annotated[Version, subcommand("version")]


def main() -> None:
    """Parse the command line and run the command; our errors are one sentence and exit code 2."""
    command = tyro.cli(Command, prog="signvote", description="One-bit training on unequal machines.")
    try:
        command.run()
    except SignVoteError as error:
        print(f"signvote: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
