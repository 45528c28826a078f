"""Accelerate, with one bit per parameter each way. The changed line has a (*).

    torchrun --nproc-per-node 2 examples/accelerate_votes.py

Accumulation, clipping and the schedule are Accelerate's. The data is bundled.
"""

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import signvote
from signvote.tasks import load_task

torch.manual_seed(0)
task = load_task("mnist-10k", model="mlp")
data = TensorDataset(task.prepare(task.train.inputs), task.train.labels)
loader = DataLoader(data, batch_size=32, shuffle=True)
model = task.model()
optimizer = signvote.Vote(model.parameters(), lr=2e-3)  # (*)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=len(loader) // 2)

accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for batch, (inputs, labels) in enumerate(loader):
    with accelerator.accumulate(model):
        loss = cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if batch % 20 == 0:
        accelerator.print(f"batch {batch}: loss {loss.item():.2f}")
accelerator.end_training()
