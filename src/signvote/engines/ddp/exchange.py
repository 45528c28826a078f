"""What moves the bytes of a round: votes to the ranks that decide them, decisions and evidence to all.

send       each rank's piece of a chunk of votes to that rank       N / 8 bytes, while gradients are computed
share      the decisions on all pieces, and the evidence            N / 8 bytes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext

import torch
from torch import Tensor

from signvote.engines.ddp.meeting import Meeting
from signvote.engines.ddp.shares import Shares
from signvote.kernels import Planes, words_for


class Exchange:
    """Buffers and collectives. Chunks travel in a thread of their own, in the order in which they were submitted.

    Args:
        meeting: the ranks.
        shares: which rank decides what.
        vote_planes: planes of a vote.
        decision_planes: planes of a decision.
        device: where the gradients are.
        overlap: whether chunks travel in a thread; False: the caller waits for each.

    """

    def __init__(
        self,
        meeting: Meeting,
        shares: Shares,
        *,
        vote_planes: int,
        decision_planes: int,
        device: torch.device,
        overlap: bool,
    ) -> None:
        votes = (shares.chunks, meeting.world, vote_planes, shares.words)
        decisions = (shares.chunks, decision_planes, shares.words)
        self.meeting = meeting
        self.shares = shares
        self.device = device
        self.bytes_sent = 0  # to other ranks, in the last round
        self._sent = torch.zeros(votes, dtype=torch.int64, device=meeting.device)
        self._received = torch.zeros_like(self._sent)
        self._decided = torch.zeros(decisions, dtype=torch.int64, device=meeting.device)
        self._thread = ThreadPoolExecutor(1, "signvote") if overlap else None
        self._stream = torch.cuda.Stream() if overlap and device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._travelling: list[Future[None]] = []

    # ---- votes ---------------------------------------------------------------------------------------

    def submit(self, work: Callable[[], None]) -> None:
        """Do work that ends with `send`: in the thread, after everything that the caller's stream has to do."""
        if self._thread is None:
            work()
            return
        ready = torch.cuda.current_stream().record_event() if self._stream else None
        self._travelling.append(self._thread.submit(self._after, ready, work))

    def _after(self, ready: torch.cuda.Event | None, work: Callable[[], None]) -> None:
        if self._stream is not None and ready is not None:
            self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            work()

    def send(self, number: int, planes: Planes) -> None:
        """Send each rank its piece of a chunk's votes."""
        sent = self._sent[number]
        world, _, words = sent.shape
        for row, plane in enumerate(p for p in planes if p is not None):
            padding = world * words - len(plane)
            sent[:, row] = torch.nn.functional.pad(plane, (0, padding)).view(world, words)
        self.meeting.all_to_all(self._received[number], sent)

    def wait(self) -> None:
        """Wait until everything submitted has arrived."""
        travelling = self._travelling
        self._travelling = []
        for future in travelling:
            future.result()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def forget(self) -> None:
        """Drop what is under way, after an error."""
        self._travelling = []

    # ---- decisions -----------------------------------------------------------------------------------

    def received(self, number: int, ranks: Sequence[int], n: int) -> Planes:
        """The votes of these ranks on the n coordinates of this rank's piece of a chunk: (ranks, words)."""
        rows = self._received[number][list(ranks), :, : words_for(n)]
        return _planes(rows.transpose(0, 1).contiguous())

    def decided(self, number: int, n: int) -> Planes:
        """Where the decision on this rank's piece of a chunk is to be written."""
        return _planes(self._decided[number][:, : words_for(n)])

    def share(self, counts: Sequence[Tensor]) -> tuple[Planes, list[Tensor]]:
        """Put all ranks' decisions together, and add all ranks' counts up."""
        mine = torch.cat([self._decided.view(-1), *(count.reshape(-1) for count in counts)])
        everybody = self.meeting.all_gather(mine)
        decided = self._decided.numel()
        summed = everybody[:, decided:].sum(0).cpu()
        sums = torch.split(summed, [count.numel() for count in counts])
        others = self.meeting.world - 1
        self.bytes_sent = 8 * others * (self._sent[:, 0].numel() + mine.numel())
        totals = [total.view(count.shape) for total, count in zip(sums, counts, strict=True)]
        return self._joined(everybody[:, :decided]), totals

    def _joined(self, pieces: Tensor) -> Planes:
        """The decision on all coordinates, from the pieces of all ranks, (world, chunks * planes * words)."""
        chunks, planes, words = self._decided.shape
        by_plane = pieces.reshape(-1, chunks, planes, words).permute(2, 1, 0, 3)
        whole = by_plane.reshape(planes, -1)
        return _planes(whole[:, : words_for(self.shares.size)].to(self.device))


def _planes(rows: Tensor) -> Planes:
    """(planes, ...) as Planes."""
    return Planes(rows[0], rows[1] if len(rows) > 1 else None)
