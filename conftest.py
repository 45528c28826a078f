"""Doctests are collected from every module but those that only some machines can import, or that do things then."""

from importlib.util import find_spec

collect_ignore_glob = ["tests/warm.py", "tests/flower_apps/*.py"]
if not find_spec("triton"):
    collect_ignore_glob += ["src/signvote/kernels/cuda*.py", "src/signvote/sim/joint/*_cuda.py"]
