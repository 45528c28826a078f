"""Bytes that a rank sends in a round over torch.distributed, by rule and number of ranks.

    python -m benchmarks.ddp_bytes              # about a minute

Ranks are processes on this machine, over gloo. Gradients are random: bytes do not depend on them. Two models have many
small tensors, which is the worst case for rules that count per tensor. `part` is bytes / (2 N / 8): 1 is one bit per
parameter each way. (W - 1) / W of that is the least, since a rank keeps its own piece. Writes
benchmarks/ddp_bytes/results.json.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import nn

from signvote.engines.ddp import VoteState, vote_gradients
from signvote.tasks.models import model_for

RANKS = (2, 4, 8)
RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "majority": ("majority", {}),
    "weighted": ("weighted", {}),
    "weighted per tensor": ("weighted", {"per": "tensor"}),
    "robust": ("robust", {}),
}
OUT = Path(__file__).with_suffix("") / "results.json"


def models() -> dict[str, nn.Module]:
    """A deep perceptron of 52 tensors, and a ResNet-20 of 65."""
    layers = [nn.Linear(60, 60) for _ in range(26)]
    return {
        "perceptron": nn.Sequential(*layers),
        "resnet20": model_for("resnet20", (3, 32, 32))(),
    }


def sent(model: nn.Module, rule: str, options: dict[str, Any]) -> int:
    """Bytes that this rank sends in the second round."""
    state = VoteState(model, rule, **options)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        vote_gradients(state)
    return state.bytes_sent


def rank(number: int, world: int, meeting: str, answers: Any) -> None:
    """One process: all models, all rules."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=world)
    torch.manual_seed(0)
    for name, model in models().items():
        size = sum(p.numel() for p in model.parameters())
        torch.manual_seed(number)
        for label, (rule, options) in RULES.items():
            result = {
                "model": name,
                "size": size,
                "ranks": world,
                "rule": label,
                "bytes": sent(model, rule, options),
            }
            if number == 0:
                answers.put(result)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure, write, print."""
    answers = mp.get_context("spawn").Queue()
    found: list[dict[str, Any]] = []
    for world in RANKS:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(rank, (world, f"{folder}/store", answers), nprocs=world)  # type: ignore[attr-defined, no-untyped-call]
        found += [answers.get() for _ in range(len(models()) * len(RULES))]
    for result in found:
        result["part"] = result["bytes"] / (result["size"] / 4)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    console = Console()
    for name in models():
        table = Table("rule", *(f"{world} ranks" for world in RANKS), title=name)
        for label in RULES:
            mine = [result for result in found if (result["model"], result["rule"]) == (name, label)]
            table.add_row(label, *(f"{result['bytes']:,} ({result['part']:.2f})" for result in mine))
        console.print(table)


if __name__ == "__main__":
    main()
