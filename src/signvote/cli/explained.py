"""What each rule does, read from the source of `signvote.core`, because importing torch would take seconds."""

from __future__ import annotations

import ast
import inspect
from importlib.resources import files

TABLE = "RULES"  # the assignment that lists the classes
SUMMARY_LINES = 2


def rules() -> dict[str, list[str]]:
    """The first two lines of each rule's docstring, by name, in the order of the table.

    >>> rules()["majority"][0]
    'signSGD-MV: every vote counts one.'
    """
    statements = _statements()
    classes = {node.name: node for node in statements if isinstance(node, ast.ClassDef)}
    tables = [node for node in statements if isinstance(node, ast.AnnAssign) and _is_table(node)]
    listed = [node.id for table in tables for node in ast.walk(table) if isinstance(node, ast.Name)]
    kinds = [classes[name] for name in listed if name in classes]
    return {name: _summary(kind) for kind in kinds if (name := _name(kind))}


def _statements() -> list[ast.stmt]:
    """The top-level statements of all modules of core."""
    sources = [path for path in files("signvote.core").iterdir() if path.name.endswith(".py")]
    return [statement for path in sources for statement in ast.parse(path.read_text("utf-8")).body]


def _is_table(node: ast.AnnAssign) -> bool:
    return isinstance(node.target, ast.Name) and node.target.id == TABLE


def _name(kind: ast.ClassDef) -> str | None:
    """The constant `name` of a class; None for a class without one, such as the type in the table's annotation."""
    for node in kind.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "name":
            return str(ast.literal_eval(node.value))
    return None


def _summary(kind: ast.ClassDef) -> list[str]:
    return inspect.cleandoc(ast.get_docstring(kind) or "").splitlines()[:SUMMARY_LINES]
