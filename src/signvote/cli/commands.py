"""All commands by name, and the parser of their flags."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Union

import tyro
from rich.console import Console
from tyro.conf import subcommand

from signvote.cli.tools import Bench, Completion, Doctor, Fetch, FlowerApp, Rules, Version, Watch
from signvote.cli.training import Compare, Report, Study, Train
from signvote.errors import ConfigError, SignVoteError
from signvote.names import check_name

COMMANDS = {
    "compare": Compare,
    "train": Train,
    "study": Study,
    "report": Report,
    "watch": Watch,
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

Each command has its own --help. signvote --version prints the version."""
ELSEWHERE = {
    "--lr": "the step size is --step",
    "--learning-rate": "the step size is --step",
    "--optimizer": "a vote takes its place: --rule and --recipe",
    "--dataset": "data and model are a --task",
    "--epochs": "the length of a run is --rounds",
    "--batch-size": "each worker has its own: --batch-sizes 64 64 256, or a --mode",
    "--weight-decay": "it is --decay",
    "--beta": "it is --momentum",
    "--gpu": "it is --device cuda",
}  # what other programs call it -> what it is called here
PIPE_CLOSED = 1  # the exit status; rich has the same
STYLE = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)


def parse(arguments: Sequence[str]) -> Any:
    """The command with its settings. A wrong flag is reported, and the process exits with code 2."""
    first, *others = arguments
    if first in COMMANDS:  # errors then lead to the help of this command
        return tyro.cli(COMMANDS[first], prog=f"signvote {first}", args=others, config=STYLE)
    kinds = []
    for name, kind in COMMANDS.items():
        first_line = (kind.__doc__ or "").split("\n")[0]
        kinds.append(Annotated[kind, subcommand(name, description=first_line)])
    any_of: Any = Union[tuple(kinds)]  # noqa: UP007
    return tyro.cli(any_of, prog="signvote", description=TEACHING, args=arguments, config=STYLE)


def run(arguments: Sequence[str]) -> None:
    """Parse and run a command. An error of signvote is one sentence and exit code 2."""
    try:
        parse(_understood(arguments)).run()
    except SignVoteError as error:
        _fail(str(error))
    except BrokenPipeError:  # the reader has seen enough, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still in the buffer
        sys.exit(PIPE_CLOSED)
    except OSError as error:
        _fail(f"{error.strerror or error}: {error.filename}" if error.filename else str(error))


def _understood(arguments: Sequence[str]) -> Sequence[str]:
    """The arguments, if there is a command of that name. None at all ask for help."""
    if not arguments:
        return ["--help"]
    if arguments[0] == "--version":
        return ["version"]
    if not arguments[0].startswith("-"):
        check_name("command", arguments[0], COMMANDS)
    for argument in arguments:
        flag = argument.partition("=")[0].replace("_", "-")
        if flag in ELSEWHERE:
            raise ConfigError(f"there is no {flag}: {ELSEWHERE[flag]}")
    return arguments


def _fail(sentence: str) -> None:
    Console(stderr=True, soft_wrap=True).print(f"signvote: {sentence}", markup=False, highlight=False)
    sys.exit(2)
