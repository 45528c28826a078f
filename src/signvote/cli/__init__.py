"""The command line: `signvote COMMAND`. Parses, shows progress, prints tables; the work is done elsewhere."""

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

signvote compare: the paper's figure on bundled data, in minutes; start here.

signvote train --rule pooled --mode 4 --attack invert:3: one run, any population.

signvote report runs/compare runs/train: all of it on one page.

signvote doctor: what is installed, fast, missing.

Each command has its own --help."""


def parse(arguments: Sequence[str]) -> Any:
    """The command with its settings; what is wrong is said, and the process ends with code 2."""
    brief = not set(arguments) & set(COMMANDS)  # all commands in a line each; a single one in full
    kinds = [
        Annotated[kind, subcommand(name, description=(kind.__doc__ or "").split("\n")[0] if brief else None)]
        for name, kind in COMMANDS.items()
    ]
    any_of: Any = Union[tuple(kinds)]  # noqa: UP007
    return tyro.cli(any_of, prog="signvote", description=TEACHING, args=arguments)


def main() -> None:
    """Parse the command line and run the command; our errors are one sentence and exit code 2."""
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
