"""Compiles the kernels of a run before its clock starts.

The first call of a kernel on a CPU compiles it, or loads it from the cache on disk. That takes up to seconds, happens
once, and says nothing about the time of a round.
"""

from __future__ import annotations

import torch

from signvote.core.ballot import parse
from signvote.core.bits import SERVER
from signvote.core.encoder import Encoder
from signvote.core.layout import Layout
from signvote.kernels import WORD, backend
from signvote.sim.setup import make_server
from signvote.sim.workers import Assignment

LENGTH = 9 * WORD + 7  # full blocks, full words and a last one that is not full
WORKERS = 3
ROUNDS = 2  # the second one has something to trust


def warm_up(work: Assignment) -> None:
    """Play two rounds with data that is thrown away. Nothing of the run, and no random state, is touched."""
    layout = Layout([("x", (LENGTH,))])
    server = make_server(work, layout)
    run = work.config.seed
    encoders = [Encoder(layout, m, work.encoding, run=run, batch_size=4) for m in range(WORKERS)]
    x = torch.zeros(LENGTH)
    for t in range(1, ROUNDS + 1):
        gradients = [torch.arange(LENGTH) * (m + t) % 5 - 2.0 for m in range(WORKERS)]
        votes = [encoder.encode(t, gradient) for encoder, gradient in zip(encoders, gradients, strict=True)]
        decision = votes[0]
        if server is not None:
            ballots = {m: encoder.ballot(t, votes[m]) for m, encoder in enumerate(encoders)}
            message = server.decide(t, ballots)
            decision = parse(message, layout=layout, run=run, worker=SERVER).planes()
        assert decision is not None  # the gradients are finite
        backend(x.device).step_(x, decision, 0, 1e-3)
