"""The yardsticks of studies/ways.py, and the text by era of studies/addresses.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from studies.addresses import eras
from studies.ways import WAYS, Compared, Feedback, Late, Stochastic, rows_of

from signvote import DataError, Layout
from signvote.sim import Config
from signvote.sim import config as config_module
from signvote.sim import setup as making
from signvote.sim.population import split
from signvote.sim.yardsticks import AGGREGATES, mean
from tests.ranks import task

LAYOUT = Layout([("w", (10, 20)), ("b", (50,))])
N = LAYOUT.size


def signals(workers: int = 4) -> torch.Tensor:
    return torch.randn(workers, N, generator=torch.Generator().manual_seed(5))


def test_the_mean_of_stochastic_signs_is_the_signal() -> None:
    way, noise, m = Stochastic(LAYOUT, 0.9, k=8), torch.Generator().manual_seed(1), signals()
    votes = torch.stack([way.sent(m, noise) for _ in range(4000)])
    assert (votes.abs() == 1).all()
    scale = 8 * torch.stack([m[:, :200].abs().mean(), m[:, 200:].abs().mean()])
    of_each = torch.cat([scale[:1].expand(200), scale[1:].expand(50)])
    assert ((votes.mean(0) * of_each - m).abs() < 6 * of_each / 4000**0.5).all()


def test_a_late_average_forgets() -> None:
    way = Late(LAYOUT, 0.0, memory=0.5)
    ones = torch.ones(N)
    assert torch.equal(way.received(ones), ones / 2)
    assert torch.equal(way.received(-ones), -ones / 4)


@pytest.mark.parametrize(("per", "scales"), [("tensor", 2), ("row", 11)])
def test_feedback_loses_nothing(per: str, scales: int) -> None:
    way, noise = Feedback(LAYOUT, 0.9, per=per), torch.Generator()
    asked = sent = torch.zeros(4, N)
    for _ in range(10):
        asked = asked + signals()
        sent = sent + way.sent(signals(), noise)
    assert way.residual is not None
    assert torch.allclose(sent + way.residual, asked, atol=1e-4)
    assert way.floats == scales
    assert rows_of(LAYOUT).size == N


@pytest.mark.parametrize("rule", WAYS)
def test_a_run_goes_any_way(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (config_module, making):
        monkeypatch.setattr(module, "YARDSTICKS", (*config_module.YARDSTICKS, *WAYS))
    monkeypatch.setitem(AGGREGATES, rule, mean)
    case = Config(
        task="points", rule=rule, batch_sizes=(4, 4, 4), rounds=3, evaluate_every=3, ramp=0.0, decay=0.0
    )
    run = Compared(case, task())
    before = run.gradients.x.clone()
    run.step()
    moved = (run.gradients.x - before).abs()
    assert torch.allclose(moved[moved > 0], torch.tensor(case.step_at(1)), rtol=1e-2)  # by the sign
    assert run.history["bytes_up"][-1] < run.layout.size * 3


def test_workers_own_eras_of_a_text(tmp_path: Path) -> None:
    for year in range(1800, 1840):
        (tmp_path / f"{year}_somebody.txt").write_text(f"{year} " * 400)
    found = eras(str(tmp_path), eras=4)
    owned = split(found.train, 4, "labels:1", seed=0)
    assert sorted(torch.cat(owned).tolist()) == list(range(len(found.train)))
    decades = []
    for part in owned:
        inputs = found.train.batch(part.sort().values[5:-5]).inputs
        assert isinstance(inputs, torch.Tensor)
        text = bytes(inputs.to(torch.uint8).flatten().tolist()).decode()
        decades.append({decade for decade in ("180", "181", "182", "183") if decade in text})
    assert decades == [{"180"}, {"181"}, {"182"}, {"183"}]
    assert "40 addresses" in found.about["text"]
    with pytest.raises(DataError, match=r"has 0 addresses; studies/addresses\.py says where they come from"):
        eras(str(tmp_path / "nowhere"))
