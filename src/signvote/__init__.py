"""One model, many unequal machines, one bit per parameter each way.

server = signvote.Server(layout, rule="weighted")
worker = signvote.Worker(model, worker_id=3, momentum=0.9)

ballot = worker.ballot(round)                # bytes, after loss.backward()
decision = server.decide(round, ballots)     # ballots: {worker_id: bytes} of the workers that answered
worker.apply(decision, step=1e-3)            # x <- x - step * decision

A name is loaded when it is first used, so that `import signvote` does not wait for torch.
"""

from typing import TYPE_CHECKING

from signvote.errors import (
    BallotError,
    ConfigError,
    DataError,
    EngineError,
    LayoutError,
    SignVoteError,
    StateError,
)

if TYPE_CHECKING:
    from signvote import checkpoint
    from signvote.core import theory
    from signvote.core.ballot import Ballot
    from signvote.core.encoding import Encoding
    from signvote.core.groups import Factors, factors, parameter_groups
    from signvote.core.layout import Layout
    from signvote.core.report import RoundReport
    from signvote.core.rule import Rule, WeightedRule
    from signvote.core.rules import RULES
    from signvote.core.scaled import ScaledVotes
    from signvote.core.server import Server
    from signvote.core.tally import Tally
    from signvote.core.trust import CountTrust, Evidence, Trust
    from signvote.core.vote import ONE, Voters, Votes, fixed_point, llr_weights, scaled
    from signvote.core.worker import Worker
    from signvote.engines.ddp.local import LocalVote
    from signvote.engines.ddp.members import Members
    from signvote.engines.ddp.optimizer import Vote
    from signvote.kernels import Coin, Planes
    from signvote.spool import Spool

__version__ = "0.1.0"

__all__ = [
    "ONE",
    "RULES",
    "Ballot",
    "BallotError",
    "Coin",
    "ConfigError",
    "CountTrust",
    "DataError",
    "Encoding",
    "EngineError",
    "Evidence",
    "Factors",
    "Layout",
    "LayoutError",
    "LocalVote",
    "Members",
    "Planes",
    "RoundReport",
    "Rule",
    "ScaledVotes",
    "Server",
    "SignVoteError",
    "Spool",
    "StateError",
    "Tally",
    "Trust",
    "Vote",
    "Voters",
    "Votes",
    "WeightedRule",
    "Worker",
    "checkpoint",
    "factors",
    "fixed_point",
    "llr_weights",
    "parameter_groups",
    "scaled",
    "theory",
]

_HOMES = {
    "ONE": "signvote.core.vote",
    "RULES": "signvote.core.rules",
    "Ballot": "signvote.core.ballot",
    "Coin": "signvote.kernels",
    "CountTrust": "signvote.core.trust",
    "Encoding": "signvote.core.encoding",
    "Evidence": "signvote.core.trust",
    "Factors": "signvote.core.groups",
    "Layout": "signvote.core.layout",
    "LocalVote": "signvote.engines.ddp.local",
    "Members": "signvote.engines.ddp.members",
    "Planes": "signvote.kernels",
    "RoundReport": "signvote.core.report",
    "Rule": "signvote.core.rule",
    "ScaledVotes": "signvote.core.scaled",
    "Server": "signvote.core.server",
    "Spool": "signvote.spool",
    "Tally": "signvote.core.tally",
    "Trust": "signvote.core.trust",
    "Vote": "signvote.engines.ddp.optimizer",
    "Voters": "signvote.core.vote",
    "Votes": "signvote.core.vote",
    "WeightedRule": "signvote.core.rule",
    "Worker": "signvote.core.worker",
    "checkpoint": "signvote.checkpoint",
    "factors": "signvote.core.groups",
    "fixed_point": "signvote.core.vote",
    "llr_weights": "signvote.core.vote",
    "parameter_groups": "signvote.core.groups",
    "scaled": "signvote.core.vote",
    "theory": "signvote.core.theory",
}  # name -> the module that defines it, or the module itself

if not TYPE_CHECKING:  # otherwise a type checker would accept any name

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name not in _HOMES:
            raise AttributeError(f"module 'signvote' has no attribute {name!r}")
        module = import_module(_HOMES[name])
        found = module if module.__name__.endswith(f".{name}") else getattr(module, name)
        globals()[name] = found  # from now on Python finds it without this function
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__} - {"TYPE_CHECKING"})
