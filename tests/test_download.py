"""Downloads, on a server of our own."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from signvote.errors import ConfigError, DataError
from signvote.tasks import TASKS
from signvote.tasks.download import OFFICIAL, File, Source, fetch, verify
from tests.ranks import PATIENCE
from tests.test_files import write_mnist

CIFAR_BYTES = 10_000 * 3073
LABELS = torch.arange(7) % 3


class Web:
    """A web server on this machine; pages by path, and the paths that were asked for."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.length: str | None = None  # what every answer says instead of its length
        self.repeats = 1  # how often every answer comes
        self.sent = 0  # bytes
        self.answered = threading.Event()
        self.asked: list[str] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Page, self))
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def source(self, path: str, content: bytes, *expected: File) -> Source:
        """A page, and the source that it is for `fetch`."""
        self.pages[f"/{path}"] = content
        md5 = hashlib.md5(content).hexdigest()
        return Source(url=f"{self.url}/{path}", size=len(content), md5=md5, files=expected)


class Page(BaseHTTPRequestHandler):
    def __init__(self, web: Web, *arguments: Any) -> None:
        self.web = web
        super().__init__(*arguments)

    def do_GET(self) -> None:
        self.web.asked.append(self.path)
        content = self.web.pages.get(self.path)
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", self.web.length or str(self.web.repeats * len(content)))
        self.end_headers()
        with suppress(OSError):  # the other side has closed the connection
            for _ in range(self.web.repeats):
                self.wfile.write(content)
                self.web.sent += len(content)
        self.web.answered.set()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setenv("no_proxy", "*")
    web = Web()
    thread = threading.Thread(target=web.server.serve_forever, args=(0.01,))
    thread.start()
    yield web
    web.server.shutdown()
    web.server.server_close()
    thread.join()


def file_of(name: str, content: bytes) -> File:
    return File(name=name, size=len(content), md5=hashlib.md5(content).hexdigest())


def tar_of(contents: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def everything_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def two(web: Web) -> dict[str, list[Source]]:
    """A data set `two` of two .gz files."""
    contents = {"two/a": b"a" * 1000, "two/b": bytes(300_000)}
    return {
        "two": [
            web.source(f"{name}.gz", gzip.compress(content), file_of(name, content))
            for name, content in contents.items()
        ]
    }


def test_fetching_unpacks_and_does_nothing_twice(
    tmp_path: Path, web: Web, two: dict[str, list[Source]]
) -> None:
    folder, told = tmp_path / "new" / "data", list[tuple[str, int, int]]()
    assert verify("two", folder, sources=two) == {"two/a": "missing", "two/b": "missing"}
    paths = fetch("two", folder, sources=two, progress=lambda *report: told.append(report))
    assert paths == [folder / "two/a", folder / "two/b"]
    assert [path.read_bytes() for path in paths] == [b"a" * 1000, bytes(300_000)]
    assert everything_below(folder) == ["two/a", "two/b"]
    assert verify("two", folder, sources=two) == {"two/a": "ok", "two/b": "ok"}
    assert [(name, done == total > 0) for name, done, total in told] == [("a.gz", True), ("b.gz", True)]

    assert fetch("two", folder, sources=two) == paths
    assert web.asked == ["/two/a.gz", "/two/b.gz"]


def test_only_what_is_missing_or_wrong_is_fetched(
    tmp_path: Path, web: Web, two: dict[str, list[Source]]
) -> None:
    (tmp_path / "two").mkdir()
    (tmp_path / "two/a.gz").write_bytes(gzip.compress(b"a" * 1000, 1))  # packed otherwise, the same content
    (tmp_path / "two/b").write_bytes(bytes(299_999) + b"x")
    report = verify("two", tmp_path, sources=two)
    assert report["two/a"] == "ok"
    assert report["two/b"].startswith("md5 ")
    assert fetch("two", tmp_path, sources=two) == [tmp_path / "two/a.gz", tmp_path / "two/b"]
    assert web.asked == ["/two/b.gz"]
    assert verify("two", tmp_path, sources=two)["two/b"] == "ok"


def test_verify_says_what_is_wrong(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist")
    (tmp_path / "mnist/train-images-idx3-ubyte").unlink()
    (tmp_path / "mnist/t10k-images-idx3-ubyte").unlink()
    (tmp_path / "mnist/t10k-images-idx3-ubyte.gz").write_bytes(b"no gzip")
    report = verify("mnist", tmp_path)
    assert report["mnist/train-images-idx3-ubyte"] == "missing"
    assert report["mnist/train-labels-idx1-ubyte"] == "15 bytes, wanted 60,008"
    assert "cannot be read (Not a gzipped file" in report["mnist/t10k-images-idx3-ubyte"]


def test_a_tar_gives_its_expected_files_and_nothing_else(tmp_path: Path, web: Web) -> None:
    contents = {
        "../evil": b"e",
        "/tmp/evil": b"e",
        "set/readme": b"r",
        "set/1.bin": b"one",
        "set/2.bin": b"two",
    }
    expected = [file_of(name, contents[name]) for name in ("set/2.bin", "set/1.bin")]
    sources = {"set": [web.source("set.tar.gz", tar_of(contents), *expected)]}
    folder = tmp_path / "data"
    assert fetch("set", folder, sources=sources) == [folder / "set/2.bin", folder / "set/1.bin"]
    assert everything_below(tmp_path) == ["data/set/1.bin", "data/set/2.bin"]
    assert (folder / "set/1.bin").read_bytes() == b"one"


def test_a_wrong_checksum_keeps_nothing(tmp_path: Path, web: Web, two: dict[str, list[Source]]) -> None:
    web.pages["/two/b.gz"] = web.pages["/two/b.gz"][:-1]
    with pytest.raises(
        DataError, match=r"b.gz came as .* md5 .*, wanted .*: cut short or changed, and not kept"
    ):
        fetch("two", tmp_path, sources=two)
    assert everything_below(tmp_path) == ["two/a"]


def test_no_network_says_what_to_do(tmp_path: Path, web: Web, two: dict[str, list[Source]]) -> None:
    del web.pages["/two/a.gz"]
    with pytest.raises(DataError) as caught:
        fetch("two", tmp_path, sources=two)
    for part in (
        f"cannot download {web.url}/two/a.gz (HTTP Error 404",
        f"Run `signvote data two --data-dir {tmp_path}` again, or put the official files there: two/a",
    ):
        assert part in str(caught.value)
    gone = Source(url="http://127.0.0.1:0/a.gz", size=1, md5="", files=(File(name="a", size=1),))
    with pytest.raises(DataError, match=r"cannot download http://127.0.0.1:0/a.gz \("):
        fetch("gone", tmp_path, sources={"gone": [gone]})
    assert everything_below(tmp_path) == []


@pytest.mark.parametrize("length", ["abc", "-1", "0x10", "9" * 5000])
def test_a_wrong_length_of_an_answer_changes_nothing(
    length: str, tmp_path: Path, web: Web, two: dict[str, list[Source]]
) -> None:
    web.length = length
    try:
        fetch("two", tmp_path, sources=two)
    except DataError as error:
        assert "two/a.gz" in str(error)
    else:
        assert set(verify("two", tmp_path, sources=two).values()) == {"ok"}


def test_a_download_ends_at_its_published_size(tmp_path: Path, web: Web) -> None:
    """The server would send 600 MB. It gets rid of the published size and of what fits into buffers."""
    page = bytes(1 << 20)
    source = web.source("a.gz", page, file_of("a", b"a"))
    web.repeats = 600
    with pytest.raises(
        DataError, match=r"a.gz has more than the 1,048,576 bytes that are published; nothing is"
    ):
        fetch("a", tmp_path, sources={"a": [source]})
    assert web.answered.wait(PATIENCE)
    assert web.sent < 100 << 20
    assert everything_below(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "content", "text"),
    [
        ("a.gz", b"plain", r"a.gz cannot be unpacked \(Not a gzipped file"),
        ("a.gz", gzip.compress(b"other"), "a.gz holds a wrong set/a: 5 bytes, wanted 3"),
        ("a.gz", gzip.compress(b"two"), "a.gz holds a wrong set/a: md5 .*, wanted "),
        ("a.tar.gz", b"plain", r"a.tar.gz cannot be unpacked \(not a gzip file"),
        ("a.tar.gz", tar_of({"set/b": b"one"}), r"a.tar.gz cannot be unpacked \(.*'set/a' not found"),
    ],
    ids=["no gzip", "another size", "another content", "no tar", "not in the tar"],
)
def test_a_download_that_is_not_what_it_should_be(
    tmp_path: Path, web: Web, path: str, content: bytes, text: str
) -> None:
    sources = {"set": [web.source(path, content, file_of("set/a", b"one"))]}
    with pytest.raises(DataError, match=text):
        fetch("set", tmp_path, sources=sources)
    assert everything_below(tmp_path) == []


def test_a_member_that_is_no_file_is_refused(tmp_path: Path, web: Web) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        info = tarfile.TarInfo("set/a")
        info.type = tarfile.DIRTYPE
        tar.addfile(info)
    sources = {"set": [web.source("a.tar.gz", out.getvalue(), file_of("set/a", b"one"))]}
    with pytest.raises(DataError, match="holds a wrong set/a: 0 bytes, wanted 3"):
        fetch("set", tmp_path, sources=sources)


def test_a_folder_that_cannot_be_written(tmp_path: Path, two: dict[str, list[Source]]) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(
        DataError, match=r"cannot write to .*file/data \(.*\); make room or use another folder"
    ):
        fetch("two", tmp_path / "file" / "data", sources=two)


def test_every_task_has_its_sources(tmp_path: Path) -> None:
    assert set(OFFICIAL) == set(TASKS)
    assert fetch("mnist-10k", tmp_path) == []
    for sources in OFFICIAL.values():
        assert all(len(source.md5) == 32 for source in sources)
        assert all(source.size < sum(file.size for file in source.files) for source in sources)
        assert all(len(file.md5 or 32 * "0") == 32 for source in sources for file in source.files)


@pytest.mark.parametrize("function", [fetch, verify])
def test_an_unknown_data_set(tmp_path: Path, function: Any) -> None:
    with pytest.raises(ConfigError, match="there is no task 'cifar'; did you mean 'cifar10'"):
        function("cifar", tmp_path)
