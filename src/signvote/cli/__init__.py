"""The command line, `signvote COMMAND`: parses flags, shows progress, prints tables. Other modules do the work."""

import sys

from signvote.cli import stopping


def main() -> None:
    """Run the command of the process. An error of signvote is one sentence and exit code 2, Ctrl-C is exit code 130."""
    stopping.watch()
    try:
        from signvote.cli.commands import run  # not before Ctrl-C is handled

        run(sys.argv[1:])
    except KeyboardInterrupt as stop:
        stopping.end(str(stop))
