"""The Trainer of transformers, with one bit per parameter each way. The changed lines have a (*).

    torchrun --nproc-per-node 2 examples/trainer_votes.py

Accumulation, clipping at 1.0 and the schedule are the Trainer's. The data is Python's standard library.
"""

import os
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import signvote

LENGTH = 64
files = sorted(Path(os.__file__).parent.glob("*.py"))
text = b"".join(file.read_bytes() for file in files)[: 2000 * LENGTH]
rows = torch.tensor(list(text)).view(-1, LENGTH)
data = [{"input_ids": row, "labels": row} for row in rows]

torch.manual_seed(0)
shape = GPT2Config(
    vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
)
model = GPT2LMHeadModel(shape)
optimizer = signvote.Vote(model.parameters(), lr=2e-3)  # (*)
arguments = TrainingArguments(
    "runs/trainer",
    max_steps=60,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    logging_steps=10,
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))  # (*)
trainer.train()
