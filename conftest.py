"""Doctests are collected from src: not from what only a machine with Triton can import."""

from importlib.util import find_spec

collect_ignore_glob = (
    [] if find_spec("triton") else ["src/signvote/kernels/cuda*.py", "src/signvote/sim/*_cuda.py"]
)
