"""Moves the bytes of a round: votes to the ranks that decide them, decisions and evidence to all ranks.

send       each rank's piece of a chunk of votes to that rank       N / 8 bytes, while gradients are computed
share      the decisions on all pieces, and the evidence            N / 8 bytes
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from signvote.engines.ddp.process_group import TURN, Group, ProcessGroup, turn_of
from signvote.engines.ddp.shares import Shares
from signvote.kernels import WORD, Planes, words_for

SLOW = 10_000_000  # nanoseconds for a turn, on a link of 50 Mbit/s


class Exchange:
    """Buffers and collectives. Chunks travel in a thread of their own, in the order in which they were submitted.

    Args:
        group: the ranks.
        shares: the coordinates that each rank decides.
        vote_planes: planes of a vote.
        decision_planes: planes of a decision.
        device: the device of the gradients.
        overlap: whether chunks travel in a thread; False: the caller waits for each chunk.

    """

    def __init__(
        self,
        group: Group,
        shares: Shares,
        *,
        vote_planes: int,
        decision_planes: int,
        device: torch.device,
        overlap: bool,
    ) -> None:
        votes = (shares.chunks, group.world, vote_planes, shares.words)
        decisions = (shares.chunks, decision_planes, shares.words)
        self.group = group
        self.shares = shares
        self.device = device
        self.round = 0
        self.bytes_sent = 0  # to other ranks, in the last round
        self._bytes = 0  # in this round, so far
        self._seconds = 0.0  # in this round, until votes had arrived
        self._sent = torch.zeros(votes, dtype=torch.int64, device=group.device)
        self._received = torch.zeros_like(self._sent)
        self._decided = torch.zeros(decisions, dtype=torch.int64, device=group.device)
        self._thread: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._pending: list[Future[None]] = []
        if overlap:
            self._thread = ThreadPoolExecutor(1, "signvote")
        if overlap and device.type == "cuda":
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @property
    def nanoseconds(self) -> int:
        """How long TURN bytes of votes have traveled in this round; it includes waiting for ranks that are late."""
        turns = max(1.0, self._bytes / TURN)
        return int(1e9 * self._seconds / turns)

    def pace(self, nanoseconds: int) -> None:
        """Choose how votes travel from now on.

        Args:
            nanoseconds: for TURN bytes, on the rank that waited least. All ranks give the same number.

        """
        if isinstance(self.group, ProcessGroup) and self.group.device.type == "cpu":
            self.group.turn = turn_of(nanoseconds / 1e9) if nanoseconds > SLOW else 0

    # ---- votes ---------------------------------------------------------------------------------------

    def submit(self, work: Callable[[], None]) -> None:
        """Run work that ends with `send`: in the thread, after everything queued on the caller's stream."""
        if self._thread is None:
            work()
            return
        ready: torch.cuda.Event | None = None
        if self._stream is not None:
            ready = torch.cuda.current_stream().record_event()
        future = self._thread.submit(self._after, ready, work)
        self._pending.append(future)

    def _after(self, ready: torch.cuda.Event | None, work: Callable[[], None]) -> None:
        if self._stream is None or ready is None:
            work()
            return
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            work()

    def send(self, numbers: range, planes: Planes) -> None:
        """Send each rank its pieces of the votes on these chunks, which follow each other."""
        words = self.shares.length // WORD  # of a chunk
        present = [plane for plane in planes if plane is not None]
        for row, plane in enumerate(present):
            for number, part in zip(numbers, torch.split(plane, words), strict=True):
                padding = words - len(part)
                padded = torch.nn.functional.pad(part, (0, padding)) if padding else part
                self._sent[number, :, row] = padded.view(self.group.world, -1)
        self._travel(numbers)

    def _travel(self, numbers: range) -> None:
        """Bring the votes on these chunks to the ranks that decide them."""
        for number in numbers:
            sent = self._sent[number]
            with self._timed():
                self.group.all_to_all(self._received[number], sent)
            self._bytes += (self.group.world - 1) * sent[0].nbytes

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count the seconds in which votes travel."""
        begun = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - begun

    def wait(self) -> None:
        """Wait until everything submitted has arrived."""
        pending = self._pending
        self._pending = []
        for future in pending:
            future.result()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def begin(self, round: int) -> None:
        """Start a round; after an error, drop what is pending."""
        self.round = round
        self._pending = []
        self.bytes_sent = self._bytes
        self._bytes = 0
        self._seconds = 0.0

    def gather(self, mine: Tensor, group: Group | None = None) -> Tensor:
        """The tensors of all voters, or of all ranks of another group, stacked by rank."""
        group = group or self.group
        gathered = group.all_gather(mine)
        self._bytes += (group.world - 1) * mine.nbytes
        return gathered

    # ---- decisions -----------------------------------------------------------------------------------

    def received(self, number: int, ranks: Sequence[int], n: int) -> Planes:
        """The votes of these ranks on the n coordinates of this rank's piece of a chunk: (ranks, words)."""
        rows = self._received[number][:, :, : words_for(n)]
        if list(ranks) != list(range(len(rows))):
            rows = rows[list(ranks)]
        return _planes(rows.transpose(0, 1).contiguous())

    def decided(self, number: int, n: int) -> Planes:
        """The buffer for the decision on this rank's piece of a chunk."""
        return _planes(self._decided[number][:, : words_for(n)])

    def share(self, message: Tensor) -> tuple[Planes, Tensor]:
        """Join the decisions of all ranks; gather a message of each, in words: (ranks, words), on the CPU."""
        decided = self._decided.view(-1)
        mine = torch.cat([decided, message.to(decided.device)])
        gathered = self.gather(mine)
        decision = self._joined(gathered[:, : len(decided)])
        messages = gathered[:, len(decided) :].cpu()
        return decision, messages

    def _joined(self, pieces: Tensor) -> Planes:
        """The decision on all coordinates, from the pieces of all ranks, (world, chunks * planes * words)."""
        chunks, planes, words = self._decided.shape
        by_rank = pieces.reshape(-1, chunks, planes, words)
        by_plane = by_rank.permute(2, 1, 0, 3)
        padded = by_plane.reshape(planes, -1)
        whole = padded[:, : words_for(self.shares.size)]
        return _planes(whole.to(self.device))


def _planes(rows: Tensor) -> Planes:
    """(planes, ...) as Planes."""
    support = rows[1] if len(rows) > 1 else None
    return Planes(rows[0], support)
