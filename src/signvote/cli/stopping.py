"""Ctrl-C: a command ends with status 130, without a traceback, and says how to resume.

It uses the standard library alone, so that `main` can handle Ctrl-C before anything else is imported.
"""

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from types import FrameType

STATUS = 128 + signal.SIGINT
RESUMABLE = ("train", "compare", "study")
IMPORTING = "<frozen importlib._bootstrap>"  # the file of Python's functions that import
SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it


class Stopped(KeyboardInterrupt):
    """A command was stopped by Ctrl-C after it had begun. Its text says how far it came."""


def watch() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, except during an import, where it ends the process at once.

    Python may lose an exception that is raised inside an import, and some packages replace it by their own.
    """
    signal.signal(signal.SIGINT, _stop)


def end(reason: str = "") -> None:
    """Say how to resume, and exit. A further Ctrl-C changes nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _say(reason)
    sys.exit(STATUS)


def resuming(arguments: Sequence[str]) -> str:
    """The command that continues a command; empty if there is nothing to continue.

    >>> resuming(["train", "--rounds", "9"]), resuming(["compare"]), resuming(["doctor"])
    ('signvote train --rounds 9 --resume', 'signvote compare', '')
    """
    if not arguments or arguments[0] not in RESUMABLE:
        return ""
    needs_flag = arguments[0] == "train" and "--resume" not in arguments
    flag = ["--resume"] if needs_flag else []
    return shlex.join(["signvote", *arguments, *flag])


def _stop(number: int, frame: FrameType | None) -> None:
    if not _is_importing(frame):
        raise KeyboardInterrupt
    if os.isatty(2):
        os.write(2, SHOW_CURSOR.encode())
    _say("")
    os._exit(STATUS)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == IMPORTING:
            return True
        frame = frame.f_back
    return False


def _say(reason: str) -> None:
    """Write to standard error without its buffer, which the interrupted code may be using."""
    command = resuming(sys.argv[1:])
    text = reason or "Stopped."
    if command:
        text += f" To resume: {command}"
    os.write(2, f"{text}\n".encode())
