"""A GPT that learns Python's standard library byte by byte. Its workers vote: one bit per parameter each way.

    python examples/gpt.py                                  # one worker: a minute on a CPU; on a GPU 4.9 M parameters
    torchrun --nproc-per-node 4 examples/gpt.py             # four workers share each batch, over gloo or NCCL
    torchrun --nproc-per-node 4 examples/gpt.py --adamw     # to compare: AdamW; DDP averages gradients in float32
    python examples/gpt.py --checkpoint runs/gpt            # stop it at any time; the same command resumes

Letters in shapes: B sequences, T bytes in each, C features, H heads.
"""

import argparse
import math
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import signvote

cuda = torch.cuda.is_available()
parser = argparse.ArgumentParser(description="A GPT on Python's standard library, trained by votes")
parser.add_argument("--adamw", action="store_true", help="AdamW of the mean gradient instead of votes")
parser.add_argument("--rounds", type=int, default=1500 if cuda else 600)
parser.add_argument("--batch", type=int, default=64 if cuda else 32, help="sequences of all workers together")
parser.add_argument("--context", type=int, default=256 if cuda else 64, help="bytes in a sequence")
parser.add_argument("--width", type=int, default=256 if cuda else 64)
parser.add_argument("--layers", type=int, default=6 if cuda else 2)
parser.add_argument("--heads", type=int, default=8 if cuda else 4)
parser.add_argument("--lr", type=float, help="of votes 1e-3, of AdamW 2e-3; on a CPU 4e-3")
parser.add_argument("--momentum", type=float, help="0.9")
parser.add_argument("--decay", type=float, help="of matrices: of votes 1, of AdamW 0.1")
parser.add_argument("--every", type=int, default=100, help="rounds between two evaluations")
parser.add_argument("--checkpoint", type=Path, help="a folder to save to and to resume from")
options = parser.parse_args()

# ---- the workers -----------------------------------------------------------------------------------

under_torchrun = "WORLD_SIZE" in os.environ
if under_torchrun:
    dist.init_process_group("nccl" if cuda else "gloo")
rank = dist.get_rank() if under_torchrun else 0
world = dist.get_world_size() if under_torchrun else 1
device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
half = torch.autocast(device.type, torch.bfloat16, enabled=cuda)

# ---- the text --------------------------------------------------------------------------------------

library = Path(sysconfig.get_path("stdlib"))
files = sorted(path for deep in ("*.py", "[a-z]*/*.py") for path in library.glob(deep))
files = [path for path in files if path.parent.name not in ("test", "site-packages", "dist-packages")]
every_tenth = b"\0".join(path.read_bytes() for path in files[::10])
others = b"\0".join(path.read_bytes() for i, path in enumerate(files) if i % 10)
validation = torch.frombuffer(bytearray(every_tenth), dtype=torch.uint8).to(device)
training = torch.frombuffer(bytearray(others), dtype=torch.uint8).to(device)


def windows(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    places = starts.to(device)[:, None] + torch.arange(options.context + 1, device=device)  # (B, T + 1)
    sequences = text[places].long()
    return sequences[:, :-1], sequences[:, 1:]  # (B, T) inputs, (B, T) the bytes that follow


# ---- the model -------------------------------------------------------------------------------------


class Block(nn.Module):
    """x + attention, then x + MLP, each of the normalized x."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.attention = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.contract = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        three = self.attention(self.norm1(x)).view(
            B, T, 3, self.heads, C // self.heads
        )  # (B, T, 3, H, C / H)
        query, key, value = three.permute(2, 0, 3, 1, 4)  # (B, H, T, C / H) each
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)  # (B, H, T, C / H)
        x = x + self.mix(found.transpose(1, 2).reshape(B, T, C))  # (B, T, C)
        return x + self.contract(F.gelu(self.expand(self.norm2(x))))  # type: ignore[no-any-return]  # (B, T, C)


class GPT(nn.Module):
    """The logits of the next byte at every place."""

    def __init__(self, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                adds = name.endswith(("mix.weight", "contract.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if adds else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]  # (B, T, C)
        x = self.norm(self.blocks(x))  # (B, T, C)
        return F.linear(x, self.tokens.weight)  # (B, T, 256) logits: the head is the embedding


def nats_per_byte(net: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    with half:
        logits = net(inputs)  # (B, T, 256)
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


torch.manual_seed(0)  # every worker starts from the same parameters
gpt = GPT(options.context, options.width, options.layers, options.heads).to(device)
size = sum(parameter.numel() for parameter in gpt.parameters())

# ---- the optimizer ---------------------------------------------------------------------------------

usual = {"lr": 1e-3 if cuda else 4e-3, "momentum": 0.9, "decay": 1.0}
if options.adamw:
    usual = {"lr": 2e-3 if cuda else 4e-3, "momentum": 0.9, "decay": 0.1}
given = {name: getattr(options, name) for name in usual if getattr(options, name) is not None}
recipe: dict[str, float] = usual | given
groups = [
    {"params": [p for p in gpt.parameters() if p.ndim == 2], "weight_decay": recipe["decay"]},
    {"params": [p for p in gpt.parameters() if p.ndim == 1], "weight_decay": 0.0},
]
net: nn.Module = gpt
if options.adamw:
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, betas=(recipe["momentum"], 0.95))
    if world > 1:
        net = DistributedDataParallel(gpt)
else:
    # Workers exchange signs: of a matrix those of the polar factor of its momentum, where all directions count alike.
    optimizer = signvote.Vote(groups, momentum=recipe["momentum"], polar=True)


def lr_at(t: int) -> float:
    """Rises over the first 10 % of the rounds, then falls to 0 as a cosine."""
    warm_up = max(1, options.rounds // 10)
    share: float = min((t + 1) / warm_up, (1 + math.cos(math.pi * t / options.rounds)) / 2)
    return share * recipe["lr"]


def bytes_of_a_round() -> int:
    if isinstance(optimizer, signvote.Vote):
        return optimizer.bytes_sent  # counted
    return 2 * (world - 1) * 4 * size // world  # computed: a ring all-reduce of float32


# ---- training --------------------------------------------------------------------------------------

first, sent = 0, 0
mine = options.checkpoint / f"rank-{rank}.pt" if options.checkpoint else None
if mine and mine.exists():
    saved = torch.load(mine, map_location=device)
    gpt.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first, sent = saved["round"], saved["sent"]

spaced = torch.linspace(0, len(validation) - options.context - 1, 128).long()  # the test, always the same
for t in range(first, options.rounds):
    random = torch.Generator().manual_seed(t * world + rank)  # a resumed run draws the same windows
    starts = torch.randint(len(training) - options.context, (options.batch // world,), generator=random)
    for group in optimizer.param_groups:
        group["lr"] = lr_at(t)
    optimizer.zero_grad()
    nats_per_byte(net, *windows(training, starts)).backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
    optimizer.step()
    sent += bytes_of_a_round()
    if (t + 1) % options.every and t + 1 < options.rounds:
        continue
    if rank == 0:
        with torch.no_grad():
            loss = nats_per_byte(gpt, *windows(validation, spaced)).item()
        print(f"round {t + 1:5}: {loss:.3f} nats per byte, {sent / 1e6:,.1f} MB sent", flush=True)
    if mine:
        mine.parent.mkdir(parents=True, exist_ok=True)
        state = {"model": gpt.state_dict(), "optimizer": optimizer.state_dict(), "round": t + 1, "sent": sent}
        torch.save(state, mine.with_suffix(".new"))
        mine.with_suffix(".new").replace(mine)  # at once: a process that dies here leaves the file before

if rank == 0:
    each = sent / options.rounds / size
    print(f"{size:,} parameters, workers: {world}, sent by each: {each:.3f} bytes per parameter and round")
if under_torchrun:
    dist.destroy_process_group()
