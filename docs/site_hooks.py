"""Additions to the site beyond docs/: other Markdown of the repository, the sources that pages link to, equations.

on_files            adds PAGES with their figures, and makes a page of each source that a page links to
on_page_markdown    points links at those pages, or into the API reference
on_page_content     converts LaTeX to MathML, so that equations need no script, and puts drawings into the page
Docstrings          for the reference: shows doctests, tables and equations unchanged
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = {  # path in the site -> path in the repository
    "readme.md": "README.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "paper/README.md": "paper/README.md",
    "studies/README.md": "studies/README.md",
}
SOURCE = "source/"  # folder of the pages that show a source
LANGUAGES = {".py": "python", ".toml": "toml", ".md": "markdown"}
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")  # text, target, anchor
LATEX = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
DRAWING = re.compile(r'<img alt="[^"]*" src="(\w+\.svg)" ?/?>')  # of docs/
REFERENCE = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
MODULES = set(re.findall(r"^::: (\S+)", REFERENCE, re.MULTILINE))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and sources outside docs/."""
    for uri, path in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    for page in list(files.documentation_pages()):
        for link in LINK.finditer(page.content_string):
            target = _target(page.src_uri, link[2])
            if target is None or _module(target) or (uri := _uri(target)) in files.src_uris:
                continue
            file = ROOT / target
            content = _shown(file) if uri.startswith(SOURCE) else file.read_bytes()
            files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Point links to files of the repository at their pages, and links to modules at the reference."""
    here = page.file.src_uri

    def moved(link: re.Match[str]) -> str:
        text, target, anchor = link.groups()
        path = _target(here, target)
        if path is None:
            return link[0]
        if module := _module(path):
            return f"[{text}][{_member(text, module)}]"
        return f"[{text}]({relpath(_uri(path), dirname(here) or '.')}{anchor or ''})"

    return markdown if here.startswith(SOURCE) else LINK.sub(moved, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Convert equations to MathML, and put drawings into the page, where they get the colors of its theme."""
    display = {"span": "inline", "div": "block"}
    content = LATEX.sub(lambda found: convert(html.unescape(found[2]), display=display[found[1]]), content)
    return DRAWING.sub(lambda found: (ROOT / "docs" / found[1]).read_text(), content)


class Docstrings(griffe.Extension):
    """Puts doctests, and paragraphs with columns aligned by spaces, into fences: Markdown would join their lines."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object of the package."""
        if obj.docstring:
            obj.docstring.value = "\n\n".join(map(_fenced_if_aligned, obj.docstring.value.split("\n\n")))


def _fenced_if_aligned(paragraph: str) -> str:
    if paragraph.startswith(">>> "):
        return f"```pycon\n{paragraph}\n```"
    has_columns = re.search(r"^\S.*\S {3,}\S", paragraph, re.MULTILINE)
    if has_columns:
        return f"```text\n{paragraph}\n```"
    return paragraph


def _target(uri: str, link: str) -> str | None:
    """The target of a link, relative to the root of the repository; None if there is no such file."""
    path = normpath(join(dirname(PAGES.get(uri, f"docs/{uri}")), link))
    return path if (ROOT / path).exists() else None


def _uri(path: str) -> str:
    """The place of a file of the repository in the site."""
    if path in PAGES.values():
        return next(uri for uri, brought in PAGES.items() if brought == path)
    figure = path.endswith((".png", ".svg"))
    return path.removeprefix("docs/") if figure or path.startswith("docs/") else f"{SOURCE}{path}.md"


def _module(path: str) -> str | None:
    """The module of a file, if the reference describes it."""
    name = path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name if name in MODULES else None


def _member(text: str, module: str) -> str:
    """The object that the text of a link to a module names: the module, or a member of it."""
    name = text.strip("`")
    is_module = "/" in name or " " in name or name.endswith(".py") or module.endswith(f".{name}")
    return module if is_module else f"{module}.{name}"


def _shown(path: Path) -> str:
    """A page that shows a file, the cells of a notebook, or all files of a folder."""
    title = f"# {path.relative_to(ROOT)}\n\n"
    if path.suffix == ".ipynb":
        cells = ((c["cell_type"], "".join(c["source"])) for c in json.loads(path.read_text())["cells"])
        return title + "\n\n".join(t if kind == "markdown" else f"```python\n{t}\n```" for kind, t in cells)
    parts = sorted(p for p in path.rglob("*") if p.is_file() and p.suffix in LANGUAGES)
    return title + "\n\n".join(_fenced(p, p.relative_to(path.parent)) for p in parts or [path])


def _fenced(path: Path, title: Path) -> str:
    language = LANGUAGES.get(path.suffix, "text")
    return f'~~~~ {{.{language} title="{title}"}}\n{path.read_text()}\n~~~~'
