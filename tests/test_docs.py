"""The documentation: the site builds, links lead somewhere, commands parse, quoted code is the code."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from signvote.cli.commands import parse

ROOT = Path(__file__).parent.parent
STUDIES = [ROOT / "paper" / "README.md", ROOT / "studies" / "README.md"]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *STUDIES])
FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s:#]*)(#[^)\s]+)?\)")
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """The info string and the text of each fenced block."""
    for _, info, text in FENCE.findall(page.read_text()):
        yield info.strip(), textwrap.dedent(text)


def anchors(page: Path) -> set[str]:
    """Headings as a repository browser names them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {"#" + re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each_page
def test_links_lead_to_files_and_headings_of_the_repository(page: Path) -> None:
    for path, anchor in LINK.findall(FENCE.sub("", page.read_text())):
        target = page.parent / path if path else page
        assert target.exists(), f"{path} is not there"
        if anchor:
            assert anchor in anchors(target), f"{path}{anchor} is no heading"


def commands(page: Path) -> Iterator[list[str]]:
    """What is shown to be typed: lines of blocks, and code within the text that has a flag or a study."""
    shown = [line for _, text in blocks(page) for line in text.splitlines()]
    shown += [
        code
        for code in re.findall(r"`([^`\n]+)`", FENCE.sub("", page.read_text()))
        if re.search(r" --|\.toml", code)
    ]
    for line in shown:
        words = shlex.split(line, comments=True) if line.startswith("signvote ") else []
        placeholders = {"...", "COMMAND", "--help"}  # "as above", or no command at all
        if words and not placeholders & set(words) and not re.search(r"[A-Z]{3}\b|\[", line.split("#")[0]):
            yield words[1 : words.index(">") if ">" in words else None]


@each_page
def test_commands_are_understood(page: Path) -> None:
    for arguments in commands(page):
        try:
            parse(arguments)
        except SystemExit:
            pytest.fail(f"signvote {shlex.join(arguments)} is not understood")


@each_page
def test_modules_to_run_are_there(page: Path) -> None:
    for name in re.findall(r"python -m ((?:benchmarks|paper|studies)\.\w+)", page.read_text()):
        assert (ROOT / name.replace(".", "/")).with_suffix(".py").exists(), name


@each_page
def test_python_is_python(page: Path) -> None:
    for info, text in blocks(page):
        if info.split()[:1] == ["python"]:
            ast.parse(text)  # not more: an excerpt may return


@pytest.mark.parametrize(
    ("page", "least"), [("algorithm.md", 11), ("unlike-data.md", 4), ("local-steps.md", 5)]
)
def test_quoted_code_is_in_the_source(page: str, least: int) -> None:
    quotes = [block for block in blocks(ROOT / "docs" / page) if "title=" in block[0]]
    assert len(quotes) >= least
    for info, text in quotes:
        name = re.fullmatch(r'python title="(.+)"', info)
        assert name, f"a quote must say its file: {text}"
        source = (ROOT / "src" / "signvote" / name[1]).read_text()
        assert any(textwrap.indent(text, " " * by) in source for by in (0, 4, 8, 12)), (
            f"not in {name[1]}:\n{text}"
        )


SPELLING = re.compile(r"\(paper, eq\. (\d)\)")


@pytest.mark.parametrize("number", ["3", "4", "5"])
def test_an_equation_is_found_by_its_number(number: str) -> None:
    """On lines that run, which the page quotes."""
    quotes = [text for info, text in blocks(ROOT / "docs" / "algorithm.md") if info.startswith("python")]
    assert any(number in SPELLING.findall(text) for text in quotes)
    assert f"(paper, eq. {number})" in (ROOT / "src/signvote/kernels/reference.py").read_text()


def test_equations_have_one_spelling() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        text = SPELLING.sub("", path.read_text())
        assert not re.search(r"\b(eqs?\.|equations?) *\(?\d", text, re.IGNORECASE), path.name


class Html(HTMLParser):
    """What a page loads, links to and can be linked at."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value for key, value in attrs if value is not None}
        self.ids |= {values[key] for key in ("id", "name") if key in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in ("link", "script", "img", "source", "iframe"):
            self.loaded += [values[key] for key in ("href", "src") if key in values]


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_is_whole(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    run = subprocess.run(build, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "WARNING" not in run.stderr, run.stderr
    pages = {path: Html(path) for path in tmp_path.rglob("*.html") if path.name != "404.html"}
    for uri in (
        "readme",
        "CHANGELOG",
        "CONTRIBUTING",
        "paper/index",
        "studies/index",
        "source/examples/ddp_mnist.py",
    ):
        assert tmp_path / f"{uri}.html" in pages
    for source in ROOT.glob("docs/**/*.md"):
        assert (tmp_path / source.relative_to(ROOT / "docs")).with_suffix(".html") in pages
    assert (
        '<svg xmlns="http://www.w3.org/2000/svg" class="rooms"'
        in (tmp_path / "architecture.html").read_text()
    )
    for path, page in pages.items():
        assert "arithmatex" not in path.read_text(), f"{path.name}: an equation was left"
        for address in page.loaded:
            assert not urlsplit(address).netloc, f"{path.name} loads {address} from elsewhere"
        for address in (*page.links, *page.loaded):
            check(address, path, pages)
    for style in tmp_path.rglob("*.css"):
        assert not re.search(r"(url\(|@import )[\"']?(https?:)?//", style.read_text())


def check(address: str, path: Path, pages: dict[Path, Html]) -> None:
    """An address within the site has its file and, if it names one, its place there."""
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    target = target / "index.html" if target.is_dir() else target
    assert target.is_file(), f"{path.name}: {address} is not there"
    if parts.fragment and target in pages:
        assert unquote(parts.fragment) in pages[target].ids, f"{path.name}: {address} has no such place"
