"""Two ranks of the examples with Accelerate, Lightning and transformers, for tests/test_apps.py.

    python tests/app_ranks.py FOLDER

For each NAME, in two processes forked from this one, which has loaded what all of them need: joins the other rank as
under torchrun, runs examples/NAME_votes.py in FOLDER/NAME and records what its optimizer steps with. Then trains a few
steps more, resumes from a checkpoint as docs/NAME.md shows, and without that page's addition. Writes all of it to
FOLDER/NAME/rank-N.pt.
"""

from __future__ import annotations

import copy
import gc
import importlib
import multiprocessing
import os
import re
import runpy
import sys
import warnings
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from signvote import Vote

ROOT = Path(__file__).resolve().parent.parent
LOADED = (
    "accelerate",
    "lightning.pytorch",
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
    "torch.distributed.fsdp",
)
RANKS = 2
STEPS = 3  # before a checkpoint, and after it


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def snippet(name: str) -> str:
    """How the page resumes: its second block of Python."""
    page = (ROOT / "docs" / f"{name}.md").read_text()
    blocks: list[str] = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return blocks[1]


# ---- the example -----------------------------------------------------------------------------------


class Record:
    """The steps of an optimizer: lr, declared sizes and this rank's gradients."""

    def __init__(self) -> None:
        self.start: list[Tensor] = []
        self.lrs: list[float] = []
        self.sizes: list[tuple[int, ...]] = []
        self.gradients: list[list[Tensor]] = []
        self.optimizer: Any = None
        self._hooks = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.optimizer is None:
            self.optimizer = optimizer
            self.start = [p.detach().clone() for p in self.parameters()]

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.lrs.append(float(optimizer.param_groups[0]["lr"]))
        self.sizes.append(optimizer.batch_sizes)
        self.gradients.append([p.grad.clone() for p in self.parameters() if p.grad is not None])

    def parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def close(self) -> dict[str, Any]:
        for hook in self._hooks:
            hook.remove()
        assert type(self.optimizer) is Vote
        return {
            "start": self.start,
            "end": [p.detach().clone() for p in self.parameters()],
            "lrs": self.lrs,
            "sizes": self.sizes,
            "gradients": self.gradients,
        }


def digits_losses(model: nn.Module, data: Any, record: Record) -> list[float]:
    """On all data: with the parameters of the start, and with those of the end."""
    inputs, labels = data.tensors
    end = [p.detach().clone() for p in record.parameters()]
    found = []
    for values in (record.start, end):
        with torch.no_grad():
            for parameter, value in zip(record.parameters(), values, strict=True):
                parameter.copy_(value)
            found.append(float(nn.functional.cross_entropy(model(inputs), labels)))
    return found


# ---- resuming --------------------------------------------------------------------------------------


def accelerate(example: dict[str, Any], record: Record) -> dict[str, Any]:
    """More training with the objects of the example. It resumes in the same optimizer."""
    model, optimizer, accelerator = example["model"], example["optimizer"], example["accelerator"]
    found: dict[str, Any] = {"losses": digits_losses(model.module, example["data"], record)}
    batches = list(example["loader"])
    optimizer.param_groups[0]["lr"] = 1e-3  # the schedule ended at 0
    saving, loading = snippet("accelerate").split("...\n")

    def trained(first: int) -> Tensor:
        for inputs, labels in batches[first : first + 2 * STEPS]:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
                optimizer.step()
                optimizer.zero_grad()
        return flat(model)

    trained(0)
    exec(saving, example)
    found["wanted"] = trained(2 * STEPS)
    exec(loading, example)
    found["resumed"] = trained(2 * STEPS)
    accelerator.load_state("runs/state")
    found["without"] = trained(2 * STEPS)
    return found


def lightning(example: dict[str, Any], record: Record) -> dict[str, Any]:
    """Two epochs, and the second again."""
    from lightning import Trainer, seed_everything
    from lightning.pytorch.callbacks import ModelCheckpoint

    exec(snippet("lightning"), example)

    def trained(checkpoint: str | None, *callbacks: Any) -> Tensor:
        seed_everything(3)
        keep = ModelCheckpoint("saved", "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        trainer = Trainer(
            devices=2,
            strategy="ddp",
            max_epochs=2,
            limit_train_batches=STEPS,
            logger=False,
            callbacks=[keep, *callbacks],
        )
        model = example["Digits"]()
        loader = torch.utils.data.DataLoader(example["data"], batch_size=32, shuffle=True)
        trainer.fit(model, loader, ckpt_path=checkpoint)
        return flat(model)

    return {
        "losses": digits_losses(example["trainer"].model.model, example["data"], record),
        "wanted": trained(None, example["EveryRank"]()),
        "resumed": trained("saved/epoch=0.ckpt", example["EveryRank"]()),
        "without": trained("saved/epoch=0.ckpt"),
    }


def trainer(example: dict[str, Any], record: Record) -> dict[str, Any]:
    """Some steps, and the second half of them again."""
    exec(snippet("trainer"), example)
    arguments = copy.deepcopy(example["arguments"])
    arguments.output_dir = "saved"
    arguments.max_steps = 2 * STEPS
    arguments.save_steps = STEPS

    def trained(checkpoint: str | None, *callbacks: Any) -> Tensor:
        torch.manual_seed(3)
        model = example["GPT2LMHeadModel"](example["shape"])
        again = example["Trainer"](
            model,
            arguments,
            train_dataset=example["data"],
            optimizers=(Vote(model.parameters(), lr=2e-3), None),
            callbacks=list(callbacks),
        )
        again.train(resume_from_checkpoint=checkpoint)
        return flat(model)

    logged = example["trainer"].state.log_history
    return {
        "losses": [entry["loss"] for entry in logged if "loss" in entry],
        "wanted": trained(None, example["EveryRank"]()),
        "resumed": trained(f"saved/checkpoint-{STEPS}", example["EveryRank"]()),
        "without": trained(f"saved/checkpoint-{STEPS}"),
    }


MORE = {"accelerate": accelerate, "lightning": lightning, "trainer": trainer}


def rank(name: str, folder: Path) -> None:
    """An example and what follows it."""
    os.chdir(folder)
    script = ROOT / "examples" / f"{name}_votes.py"
    sys.argv = [str(script)]
    if name == "accelerate":
        from accelerate import Accelerator

        Accelerator.end_training = lambda self: None  # it would end torch.distributed
    record = Record()
    example = runpy.run_path(str(script))
    found = record.close()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found |= MORE[name](example, record)
    found["warnings"] = [str(warning.message) for warning in caught]
    torch.save(found, f"rank-{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


def join(name: str, rank: int, port: int) -> None:
    """Set what torchrun would set; ranks look for each other under a name of their own, where others met before."""
    torchrun = {"RANK": rank, "WORLD_SIZE": RANKS, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": name}
    torchrun |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": RANKS, "TORCHELASTIC_USE_AGENT_STORE": True}
    torchrun |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": 0}
    os.environ.update({key: str(value) for key, value in torchrun.items()})
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    connect = rendezvous._create_c10d_store
    rendezvous._create_c10d_store = lambda *given, **more: PrefixStore(name, connect(*given, **more))


def run_ranks(name: str, folder: str, port: int) -> None:
    """All ranks of an example. If one fails, the others are ended, which would wait for it."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(name, folder, number, port)) for number in range(RANKS)]
    for process in ranks:
        process.start()
    running: dict[Any, Any] = {process.sentinel: process for process in ranks}
    while running:
        for sentinel in connection.wait(list(running)):
            ended = running.pop(sentinel)
            ended.join()
            if ended.exitcode:
                for process in ranks:
                    process.kill()
                sys.exit(f"the example with {name} failed")


def run_rank(name: str, folder: str, number: int, port: int) -> None:
    join(name, number, port)
    rank(name, Path(folder, name))


def main(folder: str) -> None:
    torch.set_num_threads(1)  # threads would not survive a fork
    for name in LOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a rank neither searches these objects nor copies the pages they lie on
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for name in MORE:
        run_ranks(name, folder, store.port)


if __name__ == "__main__":
    main(*sys.argv[1:])
