"""Flower: votes between a ServerApp and its ClientApps.

    strategy = SignVote(Layout.of(model), rule="weighted", step=1e-3)      # in the ServerApp
    strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=100)

    return vote(message, context, model, loss)                           # in the ClientApp's train

`docs/flower.md` has the whole; `signvote flower-app DIR` writes an app to start from.
"""

try:
    import flwr  # noqa: F401
except ImportError as error:
    raise ImportError("signvote.engines.flower needs flwr: pip install 'signvote[flower]'") from error

from signvote.engines.flower.client import score, vote
from signvote.engines.flower.quorum import QuorumError
from signvote.engines.flower.strategy import SignVote

__all__ = ["QuorumError", "SignVote", "score", "vote"]
