"""One bit per parameter each way for training with torch.distributed.

optimizer = signvote.Vote(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1.0)
"""

from signvote.engines.ddp.balance import Balancer, UnequalSampler
from signvote.engines.ddp.drift import copy_from_majority
from signvote.engines.ddp.hooks import noop_hook, vote_gradients, vote_hook
from signvote.engines.ddp.local import LocalVote
from signvote.engines.ddp.optimizer import Vote
from signvote.engines.ddp.saving import load, save
from signvote.engines.ddp.sharded import load_sharded, save_sharded
from signvote.engines.ddp.state import VoteState

__all__ = [
    "Balancer",
    "LocalVote",
    "UnequalSampler",
    "Vote",
    "VoteState",
    "copy_from_majority",
    "load",
    "load_sharded",
    "noop_hook",
    "save",
    "save_sharded",
    "vote_gradients",
    "vote_hook",
]
