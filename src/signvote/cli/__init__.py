"""The command line, `signvote COMMAND`: parses flags, shows progress, prints tables. Other modules do the work."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any, Union

import tyro
from rich.console import Console
from tyro.conf import subcommand

from signvote.cli.tools import Bench, Completion, Doctor, Fetch, FlowerApp, Rules, Version
from signvote.cli.training import Compare, Report, Study, Train
from signvote.errors import SignVoteError
from signvote.names import check_name

COMMANDS = {
    "compare": Compare,
    "train": Train,
    "study": Study,
    "report": Report,
    "rules": Rules,
    "data": Fetch,
    "doctor": Doctor,
    "bench": Bench,
    "flower-app": FlowerApp,
    "completion": Completion,
    "version": Version,
}
TEACHING = """One model, many unequal machines, one bit per parameter each way.

signvote compare: draw the paper's figure from bundled data, in minutes. Start here.

signvote train --rule weighted --mode 4 --attack invert:3: train once, with any workers.

signvote report runs/compare runs/train: show the results of both on one page.

signvote doctor: show what is installed, how fast it is and what is missing.

Each command has its own --help."""


def parse(arguments: Sequence[str]) -> Any:
    """The command with its settings. A wrong flag is reported, and the process exits with code 2."""
    lists_all = not set(arguments) & set(COMMANDS)  # then each command gets one line
    kinds = []
    for name, kind in COMMANDS.items():
        first_line = (kind.__doc__ or "").split("\n")[0]
        description = first_line if lists_all else None
        kinds.append(Annotated[kind, subcommand(name, description=description)])
    any_of: Any = Union[tuple(kinds)]  # noqa: UP007
    return tyro.cli(any_of, prog="signvote", description=TEACHING, args=arguments)


def main() -> None:
    """Parse the command line and run the command. An error of signvote is one sentence and exit code 2."""
    arguments = sys.argv[1:]
    try:
        if arguments and not arguments[0].startswith("-"):
            check_name("command", arguments[0], COMMANDS)
        parse(arguments).run()
    except SignVoteError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.strerror or error}: {error.filename}" if error.filename else str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(sentence: str) -> None:
    Console(stderr=True, soft_wrap=True).print(f"signvote: {sentence}", markup=False, highlight=False)
    sys.exit(2)
