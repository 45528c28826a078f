"""Lightning, with one bit per parameter each way. The changed line has a (*).

    torchrun --nproc-per-node 2 examples/lightning_votes.py

Accumulation, clipping and the schedule are Lightning's. The data is bundled.
"""

from typing import Any

import lightning
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import signvote
from signvote.tasks import load_task

task = load_task("mnist-10k", model="mlp")
data = TensorDataset(task.prepare(task.train.inputs), task.train.labels)


class Digits(lightning.LightningModule):
    """A classifier of handwritten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.model = task.model()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        inputs, labels = batch
        loss = cross_entropy(self.model(inputs), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = signvote.Vote(self.parameters(), lr=2e-3)  # (*)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


lightning.seed_everything(0)
trainer = lightning.Trainer(
    devices=2, strategy="ddp", max_epochs=1, gradient_clip_val=1.0, accumulate_grad_batches=2
)
trainer.fit(Digits(), DataLoader(data, batch_size=32, shuffle=True))
