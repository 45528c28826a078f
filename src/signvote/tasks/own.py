"""A task of your own by name: `mypackage.tasks:make` is the function `make` of the module `mypackage.tasks`."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from signvote.errors import ConfigError
from signvote.tasks.task import Task


def made(path: str, options: Mapping[str, Any]) -> Task:
    """The task that a factory makes.

    Args:
        path: MODULE:FACTORY. The module is found as `python -m` finds it: in the current folder, too.
        options: arguments of the factory, by name.

    """
    factory = _factory(path)
    signature = inspect.signature(factory)
    try:
        signature.bind(**options)
    except TypeError as error:
        given = ", ".join(f"{name}={value!r}" for name, value in options.items()) or "none"
        raise ConfigError(f"task {path!r} takes {signature}; its options here are {given}: {error}") from None
    task = factory(**options)
    if not isinstance(task, Task):
        raise ConfigError(f"task {path!r} made {type(task).__name__}; wanted a signvote.tasks.Task")
    return task


def _factory(path: str) -> Callable[..., Any]:
    module_name, _, name = path.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except (ModuleNotFoundError, ValueError) as error:
        missing = getattr(error, "name", None) or module_name
        if not f"{module_name}.".startswith(f"{missing}."):
            raise  # a module that it imports
        raise ConfigError(
            f"task is {path!r}; there is no module {module_name!r} here or among the installed ones"
        ) from None
    factory = getattr(module, name, None)
    if not callable(factory):
        functions = inspect.getmembers(module, inspect.isfunction)
        found = [key for key, value in functions if value.__module__ == module_name and key[0] != "_"]
        raise ConfigError(
            f"task is {path!r}; {module_name} has no function {name!r}, but {', '.join(found) or 'none'}"
        )
    return factory  # type: ignore[no-any-return]
