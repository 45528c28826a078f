"""All workers at once: gradients in one pass, signs in one launch, votes that never leave the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from signvote.core.bits import bytes_for, coin_for, unpack_signs
from signvote.core.corrections import claims, corrected, own, scales
from signvote.core.encoding import Encoded, Memory, encode
from signvote.core.header import HEADER
from signvote.core.server import Server
from signvote.core.sparse import body_bytes
from signvote.core.vote import Votes, everywhere
from signvote.kernels import Coins, Planes, download, upload
from signvote.sim.joint.passes import JointPass
from signvote.sim.phases import Phases
from signvote.sim.workers import Assignment, Workers


class Together(Workers):
    """The workers of a run, computed by one pass. Rows of its matrices have the order of the pass."""

    bytes_arrive_later = True

    def __init__(self, work: Assignment, joint: JointPass, phases: Phases) -> None:
        super().__init__(work, joint.gradients_by_one, phases)
        self.joint = joint
        average = torch.zeros_like(joint.matrix) if work.encoding.remembers else None
        residual = torch.zeros_like(joint.matrix) if work.encoding.feedback else None
        belief = torch.zeros_like(joint.matrix) if work.encoding.corrects else None
        self.memory = Memory(average, residual, belief)
        self._signals = joint.matrix
        self._arrive: Callable[[], tuple[int, int]] | None = None  # bytes of the last round

    def votes(self, t: int, voters: Sequence[int]) -> Votes:
        """See Workers."""
        self._compute(t)
        with self.phases.timed("encode"):
            at = self._rows(voters)
            gradient = self.joint.matrix
            before = self.memory
            if at is not None:
                gradient = gradient[at]
                before = before.map(lambda rows: rows[at])
            coins = self._coins(t, voters)
            top = self.work.config.top_at(t)
            found = encode(
                gradient,
                before,
                self.work.encoding,
                coins,
                top=top,
                layout=self.layout,
                out=gradient,
            )
            assert isinstance(found.finite, Tensor)
            self.memory = self._kept(at, before, found)
            self._signals = found.signal
        batch_sizes = self.work.config.batch_sizes
        claimed = None
        if self.work.encoding.corrects:
            claimed = claims(self._signals, self.layout)
        return Votes(
            workers=tuple(voters),
            planes=found.planes,
            n=self.layout.size,
            batch_sizes=tuple(batch_sizes[m] for m in voters),
            present=found.finite,
            claims=claimed,
        )

    def _compute(self, t: int) -> None:
        """Start the gradients of all workers. Absent ones are computed too, which changes nothing."""
        with self.phases.timed("gradients"):
            everybody = range(self.work.config.workers)
            batches = [self.work.batch(m, t) for m in everybody]
            seeds = [(*self.work.seed(m, t), 1) for m in everybody]
            relabeled = [self.work.relabels(m, t) for m in everybody]
            self.joint.gradients(batches, seeds, relabeled)

    def _coins(self, t: int, voters: Sequence[int]) -> Coins | None:
        zeros = self.work.encoding.zeros
        run = self.work.config.seed
        coins = [coin_for(zeros, run, t, m) for m in voters]
        return Coins.of(coins, self.joint.device)

    def _rows(self, voters: Sequence[int]) -> Tensor | None:
        """The rows of these workers; None: all of them, in order."""
        order = self.joint.order
        rows = [order.index(m) for m in voters]
        if rows == list(range(len(order))):
            return None
        indices = torch.tensor(rows, dtype=torch.int64)
        return upload(indices, self.joint.device)

    def _kept(self, at: Tensor | None, before: Memory, found: Encoded) -> Memory:
        """The memory of all workers after a round; rows whose signal was not finite keep what they had."""

        def kept(mine: Tensor | None, old: Tensor | None, new: Tensor | None) -> Tensor | None:
            if mine is None or old is None or new is None:
                return mine
            assert isinstance(found.finite, Tensor)
            rows = torch.where(found.finite[:, None], new, old, out=old)
            return rows if at is None else mine.index_copy_(0, at, rows)

        mine = self.memory
        after = found.memory
        average = kept(mine.average, before.average, after.average)
        residual = kept(mine.residual, before.residual, after.residual)
        return Memory(average, residual, mine.belief)

    def signals(self) -> Tensor:
        """See Workers."""
        return self._signals

    def decide(self, t: int, votes: Votes, server: Server) -> Planes:
        """See Workers. The votes stay on the device; their bytes are counted there."""
        with self.phases.timed("server"):
            decision = server.decide_planes(t, votes)
        if votes.claims is not None:
            self._correct(votes, server)
        sparse = self.work.encoding.top is not None
        self._arrive = bytes_sent(votes, decision, sparse=sparse)
        return decision

    def _correct(self, votes: Votes, server: Server) -> None:
        """Have all workers follow what the server believes of them, unless too few voted."""
        belief = self.memory.belief
        present = votes.present
        assert belief is not None
        assert present is not None
        if not len(votes.workers):
            return
        is_decided = present.sum() >= server.min_voters
        largest = server.rule.scale(votes)
        assert largest is not None
        assert votes.claims is not None
        exponents = own(votes.claims, largest)
        scale = scales(exponents, self.layout, 0, votes.n)
        rows = self._rows(votes.workers)
        voted = slice(None) if rows is None else rows
        signs = unpack_signs(votes.planes, votes.n)
        sent = signs * present[:, None]
        after = belief.clone()
        corrected(after, None, None)
        after[voted] += sent * scale
        belief.copy_(torch.where(is_decided, after, belief))

    def bytes_sent(self) -> tuple[int, int]:
        """See Workers."""
        assert self._arrive is not None
        return self._arrive()

    def mean(self, t: int, voters: Sequence[int]) -> Tensor:
        """See Workers."""
        self._compute(t)
        sizes = self.work.config.batch_sizes
        total = sum(sizes[m] for m in voters)
        shares = []
        for m in self.joint.order:
            size = sizes[m] if m in voters else 0
            shares.append(size / total)
        share = upload(torch.tensor(shares), self.joint.device)
        weighed = self.joint.matrix * share[:, None]
        return weighed.sum(0)

    def evaluate(self) -> dict[str, float]:
        """See Workers."""
        return self.joint.evaluate()

    def memories(self) -> list[Memory]:
        """See Workers."""
        order = self.joint.order
        memories = []
        for m in range(len(order)):
            select = partial(_row_of, row=order.index(m))
            memories.append(self.memory.map(select))
        return memories

    def load_memories(self, memories: Sequence[Memory]) -> None:
        """See Workers."""
        for row, m in enumerate(self.joint.order):
            for mine, its in zip(self.memory, memories[m], strict=True):
                if mine is None:
                    continue
                if its is None:
                    mine[row] = 0
                else:
                    mine[row] = its.to(self.joint.device)


def _row_of(matrix: Tensor, row: int) -> Tensor:
    """One row, on the CPU."""
    return matrix[row].cpu()


def bytes_sent(votes: Votes, decision: Planes, *, sparse: bool) -> Callable[[], tuple[int, int]]:
    """Bytes of all ballots and of all copies of the decision: those that `Ballot` would write.

    A support plane is sent only where a coordinate is left out; an abstention is a header alone.
    """
    ballots = _body_bytes(votes.planes, votes.n, sparse=sparse)
    if votes.present is not None:
        ballots = ballots * votes.present
    decided = decision.map(lambda plane: plane[None])
    body = _body_bytes(decided, votes.n, sparse=False)
    if sparse and decision.support is not None:
        body = torch.minimum(body, _body_bytes(decided, votes.n, sparse=True))
    if decision.support is not None:
        body = body * decision.support.any()  # nothing decided is a header alone
    present = votes.present
    if present is None:
        present = torch.ones(len(votes.workers))
    claimed = 0 if votes.claims is None else votes.claims.shape[1]  # bytes
    arrive = download(ballots.sum(), body, present.sum())

    def arrived() -> tuple[int, int]:
        sent, each, voters = (int(count) for count in arrive())
        workers = len(votes.workers)
        sent += voters * claimed
        if claimed and each:
            each += claimed + 8 * voters
        up = workers * HEADER.size + sent
        down = workers * (HEADER.size + each)
        return up, down

    return arrived


def _body_bytes(planes: Planes, n: int, *, sparse: bool) -> Tensor:
    """Bytes behind the header of each row's ballot."""
    rows = len(planes.signs)
    device = planes.signs.device
    one = torch.full((rows,), bytes_for(n), device=device)
    full = everywhere(n, device)
    if sparse:
        support = full[None] if planes.support is None else planes.support
        return body_bytes(support, n)
    if planes.support is None:
        return one
    partial = (planes.support != full).any(1)
    return one + one * partial
