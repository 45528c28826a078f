"""Scripts in processes that start at once: forked from one that has loaded torch, which takes a second or two.

`launched("-m", "pytest", ...)` does what `python -m pytest ...` would do. Nothing of signvote is loaded before the
fork, so a script imports it from where it runs. `TOGETHER` in conftest.py lets one such process serve many tests.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import types
import warnings
from functools import cache
from pathlib import Path

LOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "numba",
    "safetensors.torch",
    "tyro",
    "rich.progress",
    "hypothesis",
    "pytest",
)


def launched(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What `python ARGUMENTS` returns and prints in a folder, with more variables in its environment."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        request = {"arguments": arguments, "cwd": str(cwd), "environment": environment}
        server.stdin.write(json.dumps(request | {"out": str(out), "err": str(err)}) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(arguments, code, out.read_text(), err.read_text())


@cache
def _server() -> subprocess.Popen[str]:
    """Ends with this process, which closes its input."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # threads would not survive a fork
    line = [sys.executable, __file__]
    return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def serve() -> None:
    """Fork for each line, and write how the child ended. In a child, return what runs it."""
    for name in LOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # see warm.py
    for line in sys.stdin:
        child = os.fork()
        if not child:
            return become(**json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


def become(arguments: list[str], cwd: str, environment: dict[str, str], out: str, err: str) -> None:
    """Run a script, a module or code as Python does with these arguments."""
    os.chdir(cwd)
    os.environ.update(environment)
    for stream, path in ((sys.stdin, os.devnull), (sys.stdout, out), (sys.stderr, err)):
        flags = os.O_RDONLY if stream is sys.stdin else os.O_WRONLY | os.O_CREAT
        os.dup2(os.open(path, flags), stream.fileno())
    if arguments[0] == "-W":
        _, action, *arguments = arguments
        warnings.simplefilter(action)  # type: ignore[arg-type]
    what, *given = arguments
    sys.path[0] = str(Path(what).resolve().parent) if what.endswith(".py") else cwd
    sys.path[1:1] = environment.get("PYTHONPATH", "").split(os.pathsep) if "PYTHONPATH" in environment else []
    run(what, given)


def run(what: str, given: list[str]) -> None:
    """Run `-m MODULE`, `-c CODE` or a file, as the main module."""
    if what == "-m":
        sys.argv = given
        runpy.run_module(given[0], run_name="__main__", alter_sys=True)
    elif what == "-c":
        code, *sys.argv[1:] = given
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(code, main.__dict__)
    else:
        sys.argv = [what, *given]
        runpy.run_path(what, run_name="__main__")


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of the tests
    sys.path.insert(0, "")
    serve()
