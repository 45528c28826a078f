"""Results of runs: this package reads, merges and writes them, without torch.

files.py    results.json, plain or compressed
shape.py    the type and range of each entry
adding.py   runs added to a file that other processes add to
merging.py  runs of several folders as one comparison
table.py    results.csv
lengths.py  run-length coding of lists by round
"""

from signvote.results.adding import add, locked
from signvote.results.files import (
    COMPRESSED,
    FORMAT,
    NAME,
    Result,
    Results,
    current,
    identity,
    identity_of,
    read,
    results_file,
    results_of,
    write,
)
from signvote.results.lengths import length, pack, short, total, unpack
from signvote.results.merging import merged
from signvote.results.table import COLUMNS, to_csv

__all__ = [
    "COLUMNS",
    "COMPRESSED",
    "FORMAT",
    "NAME",
    "Result",
    "Results",
    "add",
    "current",
    "identity",
    "identity_of",
    "length",
    "locked",
    "merged",
    "pack",
    "read",
    "results_file",
    "results_of",
    "short",
    "to_csv",
    "total",
    "unpack",
    "write",
]
