"""The Flower engine in one process: real messages, real ClientApps' contexts, no network."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn

from signvote import Factors, Layout, LayoutError, Server, StateError, Worker, checkpoint
from signvote.engines.flower import SignVote, vote
from signvote.engines.flower.records import BALLOT, MODEL, to_array
from signvote.engines.flower_app import write_app
from signvote.errors import ConfigError
from tests.flower_grid import Client, LocalGrid

FACTORS = {"weight": Factors(step=0.3), "bias": Factors(decay=0.0)}
N = 30 * 100 + 100
PACKED = 64 + -(-N // 8)
NODES = (2**63 + 7, 11, 12)  # Flower's node ids are any 64 bits


def fresh(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(30, 100)


def mean_loss(model: nn.Module, node: int, step: int) -> Tensor:
    """Each node pulls towards its own, noisy point: a pure function of node and step."""
    noise = torch.Generator().manual_seed(1000 * (node % 97) + step)
    inputs, targets = torch.randn(8, 30, generator=noise), torch.randn(8, 100, generator=noise)
    loss: Tensor = ((model(inputs) - targets) ** 2).mean()
    return loss


def honest(message: Message, context: Context) -> Message:
    model = fresh(seed=99)  # any values: they come from the server
    return vote(message, context, model, lambda step: mean_loss(model, context.node_id, step), batch_size=8)


def train(grid: LocalGrid, rounds: int, **settings: Any) -> SignVote:
    model = fresh()
    strategy = SignVote(Layout.of(model), **settings)
    strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=rounds)
    return strategy


def grid_of(*clients: Client) -> LocalGrid:
    return LocalGrid(dict(zip(NODES, clients or (honest,) * 3, strict=True)))


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[k], b[k]) for k in a | b)


# ---- what travels ------------------------------------------------------------------------------------


def test_an_ordinary_round_is_bits_both_ways() -> None:
    grid = grid_of()
    train(grid, 3, momentum=0.9)
    assert all(size > 4 * N for size in grid.bytes_down[:3])  # the first: the whole model
    overhead = 2500  # records, names, settings: the same for any model
    assert all(PACKED < size < PACKED + overhead for size in grid.bytes_down[3:] + grid.bytes_up)


def test_nodes_and_server_hold_the_same_model() -> None:
    grid = grid_of()
    strategy = train(grid, 4, momentum=0.5, decay=0.01, evaluate_every=0, factors=FACTORS)
    model = fresh()
    for node in NODES:
        state = grid.contexts[node].state
        behind = state.array_records[MODEL].to_torch_state_dict()  # it has not seen the last decision
        model.load_state_dict(behind)
        worker = Worker(model, 0, decay=0.01, factors=FACTORS)
        step, decision = strategy.progress.decisions[4]
        worker.apply(decision, step)
        assert same(model.state_dict(), strategy.model)


@pytest.mark.parametrize(
    ("rule", "how"),
    [
        ({}, {"momentum": 0.9}),
        ({}, {"momentum": 0.99, "interpolation": 0.9, "clip": 0.1}),
        ({}, {"momentum": 0.9, "polar": True}),
        ({"rule": "mean"}, {"momentum": 0.9}),
        ({"rule": "mean", "bound": 1.0}, {"momentum": 0.9}),
    ],
)
def test_a_node_is_a_worker_of_the_strategys_settings(rule: dict[str, Any], how: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"decay": 0.5, "factors": FACTORS, **how}
    strategy = train(grid_of(), 4, **rule, **settings)
    models = {node: fresh() for node in strategy.nodes.values()}
    settings["corrects"] = bool(rule)
    workers = [Worker(models[node], m, batch_size=8, **settings) for m, node in strategy.nodes.items()]
    server = Server(strategy.layout, **rule)
    for t in range(1, 5):
        for node, model in models.items():
            model.zero_grad()
            mean_loss(model, node, t - 1).backward()  # type: ignore[no-untyped-call]
        decision = server.decide(t, {worker.worker_id: worker.ballot(t) for worker in workers})
        for worker in workers:
            worker.apply(decision, step=1e-3)
    assert same(dict(models[strategy.nodes[0]].state_dict()), strategy.model)


def test_who_missed_rounds_is_sent_the_decisions_and_who_missed_many_the_model() -> None:
    grid, model = grid_of(), fresh()
    strategy = SignVote(Layout.of(model), momentum=0.5)
    late, sizes = NODES[2], []

    def away(t: int, arrays: ArrayRecord) -> None:
        grid.online = set(NODES) - ({late} if 2 <= t + 1 <= 4 or 6 <= t + 1 <= 50 else set())
        sizes.append(len(grid.bytes_down))

    strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=51, evaluate_fn=away)
    back_after_3, back_after_45 = grid.bytes_down[sizes[4] : sizes[5]], grid.bytes_down[-3:]
    assert 4 * PACKED < max(back_after_3) < 4 * PACKED + 4000  # rounds 1 to 4
    assert max(back_after_45) > 4 * N
    assert strategy.server.report.voters == (0, 1, 2)
    assert len(strategy.progress.decisions) < 33


def test_who_lost_its_state_asks_for_the_model(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flwr")
    grid, model = grid_of(), fresh()
    strategy, voters = SignVote(Layout.of(model)), []

    def lose(t: int, arrays: ArrayRecord) -> None:
        voters.append(len(strategy.server.report.voters))
        if t == 2:
            grid.contexts[NODES[0]] = grid.fresh(NODES[0], {})

    strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=4, evaluate_fn=lose)
    assert voters == [0, 3, 3, 2, 3]
    assert strategy.server.report.refused == ()
    assert f"round 3: node {NODES[0]} asks for the whole model" in caplog.text


def test_a_node_behind_its_own_word_asks_for_the_model() -> None:
    """Flower stores a node's state after its reply: the reply may say more than was kept."""
    grid, model = grid_of(), fresh()
    strategy = SignVote(Layout.of(model))
    kept: list[RecordDict] = []

    def forgetful(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        kept.append(RecordDict(dict(context.state)))
        if len(kept) == 2:
            context.state = kept[0]
        return reply

    grid.clients[NODES[1]] = forgetful
    strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=4)
    assert strategy.server.report.voters == (0, 1, 2)
    assert strategy.server.rule.trust is not None
    assert strategy.server.rule.trust.state_dict()["counts"][:, 1].sum() == N * 3 * 3, (
        "two voters teach nothing"
    )


# ---- modes -------------------------------------------------------------------------------------------


def test_local_steps_vote_on_what_they_changed() -> None:
    grid = grid_of()
    strategy = train(grid, 1, local_steps=5, local_rate=0.05, step=0.1, rule="majority")
    total = torch.zeros(N)
    for node in NODES:
        model = fresh()
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(5):
            optimizer.zero_grad()
            mean_loss(model, node, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        total += torch.sign(before - nn.utils.parameters_to_vector(model.parameters()).detach())
    expected = before - 0.1 * torch.sign(total)
    got = torch.cat([strategy.model[s.name].flatten() for s in strategy.layout.segments])
    assert torch.equal(got, expected)


def test_a_step_by_round_and_a_rule_with_options() -> None:
    steps = [0.5, 0.25, 0.125]
    strategy = train(grid_of(), 3, step=lambda t: steps[t - 1], rule="it-signsgd", warmup=1, zeros="abstain")
    assert [step for step, _ in strategy.progress.decisions.values()] == steps
    assert strategy.server.rule.name == "it-signsgd"


# ---- who is not counted ------------------------------------------------------------------------------


def sends(make: Callable[[Message, Message], RecordDict | None]) -> Client:
    """A node that changes the content of its honest reply."""

    def client(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        content = make(message, reply)
        return Message(content if content is not None else RecordDict(), reply_to=message)

    return client


def with_ballot(reply: Message, ballot: bytes) -> RecordDict:
    reply.content[BALLOT] = ArrayRecord({BALLOT: to_array(ballot)})
    return reply.content


def without_ballot(message: Message, reply: Message) -> RecordDict:
    del reply.content[BALLOT]
    return reply.content


def ballot_of(reply: Message) -> bytes:
    return reply.content.array_records[BALLOT][BALLOT].data


BAD = {
    "magic": lambda message, reply: with_ballot(reply, b"x" * PACKED),
    "length": lambda message, reply: with_ballot(reply, ballot_of(reply)[:-1]),
    "checksum": lambda message, reply: with_ballot(reply, ballot_of(reply)[:-1] + b"\x55"),
    "late": lambda message, reply: with_ballot(reply, Worker(fresh(), 2).ballot(0)),
    "future": lambda message, reply: with_ballot(reply, Worker(fresh(), 2).ballot(7)),
    "worker": lambda message, reply: with_ballot(reply, Worker(fresh(), 1).ballot(1)),
    "run": lambda message, reply: with_ballot(reply, Worker(fresh(), 2, run=5).ballot(1)),
    "layout": lambda message, reply: with_ballot(reply, Worker(nn.Linear(2, 2), 2).ballot(1)),
    "type": without_ballot,
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_ballot_costs_one_vote_and_is_reported(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flwr")
    grid = grid_of()
    grid.clients[NODES[0]] = sends(BAD[reason])  # the largest id: worker 2
    strategy = train(grid, 1)
    assert list(strategy.nodes.values()) == sorted(NODES)
    assert strategy.server.report.voters == (0, 1)
    assert [(r.worker, r.reason) for r in strategy.server.report.refused] == [(2, reason)]
    assert f"round 1: refused node {NODES[0]} (worker 2): {reason}: " in caplog.text
    assert "round 1: 2 voted, 1 refused, 0 abstained, 0 silent" in caplog.text


def test_an_answer_without_anything_is_no_vote() -> None:
    grid = grid_of(sends(lambda message, reply: None), honest, honest)
    assert train(grid, 2).server.report.voters == (0, 1)


def test_metrics_of_a_node_may_be_anything() -> None:
    def odd(message: Message, reply: Message) -> RecordDict:
        reply.content["metrics"] = MetricRecord({"loss": [1.0, 2.0]})
        reply.content["signvote"]["applied"] = "soon"  # type: ignore[assignment]
        return reply.content

    strategy = train(grid_of(sends(odd), honest, honest), 2)
    assert strategy.server.report.voters == (0, 1, 2)


def test_a_node_that_raises_and_one_that_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    def raises(message: Message, context: Context) -> Message:
        raise RuntimeError("out of memory")

    caplog.set_level(logging.INFO, "flwr")
    grid = grid_of(raises, honest, honest)
    grid.answer = lambda node, m, ask=grid.answer: None if node == NODES[1] else ask(node, m)  # type: ignore[method-assign, misc]
    strategy = train(grid, 1)
    assert strategy.server.report.voters == (1,)
    assert f"round 1: error from node {NODES[0]}: RuntimeError('out of memory')" in caplog.text
    assert "1 voted, 0 refused, 0 abstained, 2 silent (workers [0, 2])" in caplog.text


def test_a_loss_that_is_not_finite_abstains(caplog: pytest.LogCaptureFixture) -> None:
    def broken(message: Message, context: Context) -> Message:
        model = fresh()
        return vote(message, context, model, lambda step: mean_loss(model, 1, step) * float("nan"))

    strategy = train(grid_of(broken, honest, honest), 1)
    assert strategy.server.report.abstained == {2: "non-finite gradient"}
    assert "(worker 2) abstains: non-finite gradient" in caplog.text


# ---- quorum, checkpoint ------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["weighted", "it-signsgd", "robust"])
def test_a_resumed_run_is_the_uninterrupted_one(rule: str, tmp_path: Path) -> None:
    saved = tmp_path / "run.safetensors"
    train(grid_of(), 3, rule=rule, checkpoint=saved)
    resumed, whole = train(grid_of(), 6, rule=rule, checkpoint=saved), train(grid_of(), 6, rule=rule)
    assert same(resumed.model, whole.model)
    assert resumed.nodes == whole.nodes
    assert checkpoint.load(saved)["server"]["last_round"] == 6


def test_a_finished_run_gives_its_model_again(tmp_path: Path) -> None:
    saved, model = tmp_path / "run.safetensors", fresh()
    done = train(grid_of(), 3, checkpoint=saved)
    again = SignVote(Layout.of(model), checkpoint=saved)
    asked: list[int] = []
    result = again.start(
        grid_of(),
        ArrayRecord(model.state_dict()),
        num_rounds=3,
        evaluate_fn=lambda t, arrays: asked.append(t),
    )
    assert asked == [3]
    assert same(dict(result.arrays.to_torch_state_dict()), done.model)


def test_trust_stays_with_the_node_that_comes_back(tmp_path: Path) -> None:
    """Numbers are given once; a newcomer gets the next, wherever its id sorts."""
    saved = tmp_path / "run.safetensors"
    train(grid_of(), 2, checkpoint=saved)
    grid = LocalGrid({5: honest, NODES[1]: honest})
    strategy = train(grid, 3, checkpoint=saved)
    assert strategy.nodes == dict(enumerate([*sorted(NODES), 5]))
    assert strategy.server.report.voters == (0, 3)


# ---- settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"local_steps": 0}, "local_steps is 0; it must be 1 or more"),
        ({"min_available_nodes": 0}, "min_available_nodes is 0; it must be 1 or more"),
        ({"min_ballots": -1}, "min_ballots is -1; it must be 0 or more"),
        ({"min_voters": 0}, "min_voters is 0; it must be 1 or more"),
        ({"evaluate_every": -1}, "evaluate_every is -1; it must be 0 or more"),
        ({"buffers_every": -1}, "buffers_every is -1; it must be 0 or more"),
        ({"run": 2**63}, "it must lie in 0..2\\^63-1"),
        ({"rule": "weigted"}, "did you mean 'weighted'"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        SignVote(Layout.of(fresh()), **settings)


def test_arrays_of_another_model_are_refused() -> None:
    strategy = SignVote(Layout.of(fresh()))
    with pytest.raises(LayoutError, match="the initial arrays lack bias"):
        strategy.start(grid_of(), ArrayRecord({"weight": torch.zeros(100, 30)}))
    with pytest.raises(LayoutError, match="the initial arrays have other shapes"):
        strategy.start(grid_of(), ArrayRecord(nn.Linear(2, 2).state_dict()))


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "other", {"kind": "run"})
    with pytest.raises(StateError, match="state has kind 'run'; wanted 'flower'"):
        train(grid_of(), 1, checkpoint=tmp_path / "other")


def test_without_flwr_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['flwr'] = None; import signvote.engines.flower"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: signvote.engines.flower needs flwr: pip install 'signvote[flower]'" in run.stderr


def test_flower_app_writes_an_app_whose_parts_are_there(tmp_path: Path) -> None:
    """That it runs and learns: tests/test_flower_simulation.py."""
    written = {str(p.relative_to(tmp_path / "app")): p.read_text() for p in write_app(tmp_path / "app")}
    assert all(compile(text, name, "exec") for name, text in written.items() if name.endswith(".py"))
    settings = tomllib.loads(written["pyproject.toml"])["tool"]["flwr"]["app"]
    for module, _, thing in (part.partition(":") for part in settings["components"].values()):
        assert f"\n{thing} = " in written[module.replace(".", "/") + ".py"]
    used = set(re.findall(r'\bconfig\["(.*?)"\]', "".join(written.values())))
    assert used == set(settings["config"])
    with pytest.raises(ConfigError, match="is there already and not an empty folder"):
        write_app(tmp_path / "app")
