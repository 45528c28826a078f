"""What the site has beyond docs/: other Markdown of the repository, the sources that pages link to, equations.

on_files            brings in PAGES with their figures, and makes a page of each source that is linked to
on_page_markdown    points links at those pages, or into the API reference
on_page_content     LaTeX becomes MathML, so that equations need no script
Docstrings          for the reference: doctests, tables and equations are shown as they stand
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
PAGES = {  # in the site: in the repository
    "readme.md": "README.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "paper/README.md": "paper/README.md",
    "studies/README.md": "studies/README.md",
}
SOURCE = "source/"  # pages that show a source
LANGUAGES = {".py": "python", ".toml": "toml", ".md": "markdown"}
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")  # text, target, anchor
LATEX = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
REFERENCE = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
MODULES = set(re.findall(r"^::: (\S+)", REFERENCE, re.MULTILINE))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Bring in what lies outside docs/."""
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
    """Links to files of the repository lead to where the site has them; to a module, into the reference."""
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
    """Equations as MathML."""
    display = {"span": "inline", "div": "block"}
    return LATEX.sub(lambda found: convert(html.unescape(found[2]), display=display[found[1]]), content)


class Docstrings(griffe.Extension):
    """Fences what Markdown would run together: doctests, and paragraphs whose columns are aligned by spaces."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object of the package."""
        if obj.docstring:
            obj.docstring.value = "\n\n".join(map(_fenced_if_aligned, obj.docstring.value.split("\n\n")))


def _fenced_if_aligned(paragraph: str) -> str:
    if paragraph.startswith(">>> "):
        return f"```pycon\n{paragraph}\n```"
    return (
        f"```text\n{paragraph}\n```" if re.search(r"^\S.*\S {3,}\S", paragraph, re.MULTILINE) else paragraph
    )


def _target(uri: str, link: str) -> str | None:
    """What a link of a page points to, from the root of the repository; None: nothing there."""
    path = normpath(join(dirname(PAGES.get(uri, f"docs/{uri}")), link))
    return path if (ROOT / path).exists() else None


def _uri(path: str) -> str:
    """Where the site has a file of the repository."""
    if path in PAGES.values():
        return next(uri for uri, brought in PAGES.items() if brought == path)
    figure = path.endswith((".png", ".svg"))
    return path.removeprefix("docs/") if figure or path.startswith("docs/") else f"{SOURCE}{path}.md"


def _module(path: str) -> str | None:
    """The module that a file is, if the reference has it."""
    name = path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name if name in MODULES else None


def _member(text: str, module: str) -> str:
    """What the text of a link to a module names: the module, or something in it."""
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
