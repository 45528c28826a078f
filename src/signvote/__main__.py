"""`python -m signvote`: the command line, where the command itself is not on the path."""

from signvote.cli import main

main()
