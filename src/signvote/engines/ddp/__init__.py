"""One bit per parameter each way for training with torch.distributed.

from signvote.engines.ddp import VoteState, vote_hook

ddp = DistributedDataParallel(model)
state = VoteState(ddp, rule="weighted", momentum=0.9)
ddp.register_comm_hook(state, vote_hook)
optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
"""

from signvote.engines.ddp.balance import Balancer, UnequalSampler
from signvote.engines.ddp.drift import copy_from_majority
from signvote.engines.ddp.hooks import noop_hook, vote_gradients, vote_hook
from signvote.engines.ddp.saving import load, save
from signvote.engines.ddp.state import VoteState

__all__ = [
    "Balancer",
    "UnequalSampler",
    "VoteState",
    "copy_from_majority",
    "load",
    "noop_hook",
    "save",
    "vote_gradients",
    "vote_hook",
]
