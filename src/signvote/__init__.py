"""One model, many unequal machines, one bit per parameter each way.

server = signvote.Server(layout, rule="pooled")
worker = signvote.Worker(model, worker_id=3, momentum=0.9)

ballot = worker.ballot(round)                # bytes, after loss.backward()
decision = server.decide(round, ballots)     # ballots: {worker_id: bytes} of whoever answered
worker.apply(decision, step=1e-3)            # x <- x - step * decision
"""

from signvote import checkpoint
from signvote.core import theory
from signvote.core.ballot import Ballot
from signvote.core.layout import Layout
from signvote.core.rule import Rule
from signvote.core.rules import RULES
from signvote.core.server import RoundReport, Server
from signvote.core.worker import Worker
from signvote.errors import BallotError, ConfigError, DataError, LayoutError, SignVoteError, StateError

__version__ = "0.1.0"

__all__ = [
    "RULES",
    "Ballot",
    "BallotError",
    "ConfigError",
    "DataError",
    "Layout",
    "LayoutError",
    "RoundReport",
    "Rule",
    "Server",
    "SignVoteError",
    "StateError",
    "Worker",
    "checkpoint",
    "theory",
]
