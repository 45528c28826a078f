from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from signvote import ConfigError, Layout, Server, Worker
from signvote.core.ballot import parse
from signvote.core.bits import coin_for, unpack_signs
from signvote.core.encoder import Encoder
from signvote.core.encoding import Encoding, Memory, encode
from signvote.kernels import Coins


def signs(encoder: Encoder, round: int, gradient: torch.Tensor) -> torch.Tensor:
    planes = encoder.encode(round, gradient.clone())
    assert planes is not None
    return unpack_signs(planes, gradient.numel())


@given(
    st.integers(1, 200),
    st.sampled_from([None, 0.05, 0.5, 1.0]),
    st.sampled_from([0.0, 0.9]),
    st.integers(0, 9),
)
def test_feedback_loses_nothing(n: int, top: float | None, momentum: float, seed: int) -> None:
    """What was said so far, each sign at its scale, and what is unsaid add up to all signals."""
    generator = torch.Generator().manual_seed(seed)
    encoder = Encoder(Layout([("w", (n,))]), 0, Encoding(feedback=True, top=top, momentum=momentum))
    said, signals, m = torch.zeros(3, n, dtype=torch.float64)
    for t in range(1, 6):
        gradient = torch.randn(n, generator=generator, dtype=torch.float64)
        m = momentum * m + (1 - momentum) * gradient
        v = m + (0 if encoder.memory.residual is None else encoder.memory.residual)
        sent = signs(encoder, t, gradient)
        assert torch.equal(sent[sent != 0], v.sign().to(torch.int8)[sent != 0])
        scale = v.abs()[sent != 0].mean()
        said, signals = said + scale * sent, signals + m
        torch.testing.assert_close(said + encoder.memory.residual, signals)


def test_feedback_says_in_the_end_what_top_leaves_out() -> None:
    """A constant gradient of one large and one small coordinate, one vote a round: the small one has its turn."""
    gradient, turns = torch.tensor([1.0, -0.4]), torch.zeros(2)
    encoder = Encoder(Layout([("w", (2,))]), 0, Encoding(feedback=True, top=0.5))
    for t in range(1, 29):
        turns += signs(encoder, t, gradient).abs()
    assert turns.sum() == 28
    assert turns[1] > 4
    without = Encoder(Layout([("w", (2,))]), 0, Encoding(top=0.5))
    assert all(signs(without, t, gradient).tolist() == [1, 0] for t in range(1, 29))


def test_a_gradient_that_is_not_finite_leaves_the_unsaid_alone() -> None:
    encoder = Encoder(Layout([("w", (3,))]), 0, Encoding(feedback=True))
    encoder.encode(1, torch.tensor([1.0, -2.0, 3.0]))
    before = encoder.memory.residual
    assert encoder.encode(2, torch.tensor([1.0, torch.nan, 3.0])) is None
    assert encoder.memory.residual is before


def test_decay_pulls_everywhere_and_needs_no_vote() -> None:
    model = torch.nn.Linear(3, 2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    worker = Worker(model, 0, decay=0.5)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    worker.apply(Server(worker.layout, "majority").decide(1, {0: worker.ballot(1)}), step=0.1)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] * 0.95 - 0.1)
    with pytest.raises(ConfigError, match="decay is -1"):
        Worker(model, 0, decay=-1)


def test_a_worker_goes_on_with_what_was_unsaid() -> None:
    named = {"w": torch.randn(50)}
    first, second = (Worker(named, 0, feedback=True, interpolation=0.5, top=0.2) for _ in range(2))
    named["w"].grad = torch.randn(50)
    first.ballot(1)
    second.load_state_dict(first.state_dict())
    named["w"].grad = torch.randn(50)
    assert first.ballot(2) == second.ballot(2)


def test_few_votes_make_a_short_decision() -> None:
    """Of 15 workers with a share of 1 % each, at most 15 % of the coordinates are decided."""
    layout = Layout([("w", (10_000,))])
    server = Server(layout, "majority", zeros="abstain")
    encoders = [Encoder(layout, m, Encoding(top=0.01, zeros="abstain")) for m in range(15)]
    gradients = [torch.randn(10_000) for _ in encoders]
    planes = [encoder.encode(1, g) for encoder, g in zip(encoders, gradients, strict=True)]
    ballots = {m: encoder.ballot(1, planes[m]) for m, encoder in enumerate(encoders)}
    message = server.decide(1, ballots)
    assert len(message) < 10_000 / 8
    decided = unpack_signs(parse(message, layout=layout, run=0, round=1).planes(), 10_000)
    sums = sum(unpack_signs(p, 10_000) for p in planes if p is not None)
    assert torch.equal(decided, torch.as_tensor(sums).sign())


ENCODINGS = [
    Encoding(momentum=0.9),
    Encoding(momentum=0.99, interpolation=0.9, feedback=True),
    Encoding(momentum=0.9, clip=0.1),
    Encoding(feedback=True),
    Encoding(momentum=0.9, polar=True),
    Encoding(momentum=0.9, top=0.1, feedback=True),
    Encoding(top=0.01, zeros="abstain"),
]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
def test_rows_are_encoded_as_each_worker_alone(encoding: Encoding, device: str) -> None:
    """Six rounds of three workers: the same planes and memory, bit for bit, whatever shares the matrix."""
    n = 70_001
    layout = Layout([("matrix", (70, 1000)), ("bias", (1,))])
    together, alone = Memory(), [Memory() for _ in range(3)]
    for t in range(1, 7):
        gradients = torch.randn(3, n, generator=torch.Generator().manual_seed(t)).to(device)
        gradients[:, ::5] = 0
        coins = [coin_for(encoding.zeros, 0, t, m) for m in range(3)]
        rows = encode(gradients, together, encoding, Coins.of(coins, device), layout=layout)
        together = rows.memory
        for m, coin in enumerate(coins):
            one = encode(gradients[m].clone(), alone[m], encoding, coin, layout=layout)
            alone[m] = one.memory
            assert bool(one.finite)
            for mine, its in ((one.planes, rows.planes), (one.memory, rows.memory)):
                for a, b in zip(mine, its, strict=True):
                    assert (a is None) == (b is None)
                    assert a is None or b is None or torch.equal(a, b[m])


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9])
def test_the_signs_of_one_average_and_the_memory_of_another(alpha: float, momentum: float) -> None:
    """Lion's interpolation. Equal to the momentum, it is what there is without it."""
    encoder = Encoder(Layout([("w", (70,))]), 0, Encoding(momentum=momentum, interpolation=alpha))
    plain = Encoder(encoder.layout, 0, Encoding(momentum=momentum))
    m = torch.zeros(70)
    for t in range(1, 6):
        gradient = torch.randn(70)
        signal = torch.lerp(m, gradient, 1 - alpha)
        m = torch.lerp(m, gradient, 1 - momentum)
        usual = signs(plain, t, gradient)
        assert torch.equal(signs(encoder, t, gradient), signal.sign().to(torch.int8))
        if encoder.memory.average is not None:
            assert torch.equal(encoder.memory.average, m)
        if alpha == momentum:
            assert torch.equal(usual, signal.sign().to(torch.int8))
    assert (encoder.memory.average is None) == (alpha == momentum == 0)


@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 1e30])
def test_clipping_is_that_of_torch(size: float) -> None:
    """Momentum averages what torch would have clipped; a gradient of 0 or of any size is no trouble."""
    encoder = Encoder(Layout([("w", (1000,))]), 0, Encoding(momentum=0.9, clip=0.5))
    p = torch.zeros(1000, dtype=torch.float64, requires_grad=True)
    p.grad = size * torch.randn(1000, dtype=torch.float64)
    encoder.encode(1, p.grad.float())
    torch.nn.utils.clip_grad_norm_([p], 0.5)
    assert encoder.memory.average is not None
    torch.testing.assert_close(encoder.memory.average, 0.1 * p.grad.float(), rtol=1e-4, atol=0)
    assert encoder.encode(2, torch.zeros(1000)) is not None
    for wrong in (torch.nan, torch.inf):
        assert encoder.encode(3, torch.full((1000,), wrong)) is None
    with pytest.raises(ConfigError, match="clip is 0; it must be above 0"):
        Encoding(clip=0)


def test_the_gradient_becomes_the_signal_without_the_residual() -> None:
    encoder = Encoder(Layout([("w", (70,))]), 0, Encoding(momentum=0.9, interpolation=0.5, feedback=True))
    encoder.encode(1, torch.ones(70))
    gradient = torch.randn(70)
    wanted = torch.lerp(torch.full((70,), 0.1), gradient, 0.5)
    encoder.encode(2, gradient)
    torch.testing.assert_close(gradient, wanted)


def test_an_interpolation_out_of_range_or_with_corrections_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"interpolation is 1\.0; it must lie in \[0, 1\)"):
        Encoding(interpolation=1.0)
    with pytest.raises(ConfigError, match="are of m itself: use interpolation=None"):
        Encoding(interpolation=0.5, corrects=True)
    with pytest.raises(ConfigError, match="are of m itself: use interpolation=None and polar=False"):
        Encoding(polar=True, corrects=True)


@pytest.mark.parametrize("encoding", [Encoding(momentum=0.9), Encoding(momentum=0.9, interpolation=0.5)])
def test_a_slice_is_encoded_as_a_part_of_the_whole(encoding: Encoding) -> None:
    """Where no sign depends on other coordinates, as a rank does it chunk by chunk."""
    gradient, average = torch.randn(2, 1000)
    coin = coin_for("coin", 0, 1, 5)
    assert coin is not None
    whole = encode(gradient, Memory(average), encoding, coin)
    part = encode(gradient[640:], Memory(average[640:]), encoding, coin.after(640))
    assert torch.equal(part.planes.signs, whole.planes.signs[10:])
    assert part.memory.average is not None
    assert whole.memory.average is not None
    assert torch.equal(part.memory.average, whole.memory.average[640:])


def test_what_an_encoding_needs() -> None:
    """Two planes where coordinates may be left out; the whole vector where a sign depends on other coordinates."""
    needs = {
        encoding: (encoding.planes, encoding.needs_whole_vector)
        for encoding in (
            *(Encoding(), Encoding(zeros="abstain"), Encoding(top=0.5), Encoding(feedback=True)),
            Encoding(clip=0.5),
        )
    }
    assert list(needs.values()) == [(1, False), (2, False), (2, True), (1, True), (1, True)]


def test_an_encoding_is_its_settings_one_by_one() -> None:
    named = {"w": torch.zeros(40)}
    named["w"].grad = torch.randn(40)
    settings = {"momentum": 0.5, "zeros": "abstain", "top": 0.25, "feedback": True}
    whole = Worker(named, 0, encoding=Encoding(**settings))  # type: ignore[arg-type]
    apart = Worker(named, 0, **settings)  # type: ignore[arg-type]
    assert [whole.ballot(t) for t in (1, 2)] == [apart.ballot(t) for t in (1, 2)]
