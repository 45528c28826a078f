"""What every rank would load by itself: imported once by the process that ranks are forked from."""

from __future__ import annotations

import gc

import torch
import torch._dynamo  # which making an optimizer imports
import torch.distributed.fsdp

from tests.ranks import config, simulated

torch.set_num_threads(1)  # threads would not survive a fork
if torch.version.cuda is None:  # with CUDA, the first backward pass starts threads
    for rule in ("majority", "it-signsgd", "robust"):  # compiled kernels are loaded by using them
        for zeros in ("coin", "abstain"):
            simulated(config(rule, 3, 6, zeros=zeros))
gc.collect()
gc.freeze()  # a rank neither searches these objects nor copies the pages they lie on
