"""Download the official files of a data set and check them."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from signvote.checkpoint import write_atomically
from signvote.errors import DataError
from signvote.names import check_name
from signvote.tasks.files import (
    CIFAR_FOLDER,
    CIFAR_IMAGES,
    CIFAR_RECORD,
    CIFAR_TEST,
    CIFAR_TRAIN,
    IDX_TEST,
    IDX_TRAIN,
    find,
    md5,
    read_bytes,
)

Progress = Callable[[str, int, int], None]  # file, bytes so far, total bytes

MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist"
FASHION_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
CIFAR_URL = "https://www.cs.toronto.edu/~kriz"
CHUNK_BYTES = 1 << 18
TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class File:
    """The expected form of an unpacked file."""

    name: str  # relative to the data folder
    size: int
    md5: str | None = None  # if one is published


@dataclass(frozen=True, kw_only=True)
class Source:
    """A download: the .gz of one file, or a .tar.gz with several."""

    url: str
    size: int  # bytes of the download
    md5: str
    files: tuple[File, ...]


def _idx_sources(
    task: str,
    url: str,
    packed: dict[str, int],
    plain: tuple[str | None, ...],
) -> list[Source]:
    """The four IDX files of MNIST or a look-alike: md5s of the .gz files with their sizes, and of the plain ones."""
    names = IDX_TRAIN + IDX_TEST
    sizes = (  # a header, then a byte per pixel or label
        16 + 60_000 * 784,
        8 + 60_000,
        16 + 10_000 * 784,
        8 + 10_000,
    )
    found = []
    for name, size, packed_md5, plain_md5 in zip(names, sizes, packed, plain, strict=True):
        file = File(name=f"{task}/{name}", size=size, md5=plain_md5)
        source = Source(
            url=f"{url}/{name}.gz",
            size=packed[packed_md5],
            md5=packed_md5,
            files=(file,),
        )
        found.append(source)
    return found


OFFICIAL: Mapping[str, list[Source]] = {
    "mnist-10k": [],  # bundled
    "mnist": _idx_sources(
        "mnist",
        MNIST_URL,
        {
            "f68b3c2dcbeaaa9fbdd348bbdeb94873": 9_912_422,
            "d53e105ee54ea40749a09fcbcd1e9432": 28_881,
            "9fb629c4189551a2d022fa330f9573f3": 1_648_877,
            "ec29112dd5afa0611ce80d1b7f02629c": 4_542,
        },
        (
            "6bbc9ace898e44ae57da46a324031adb",
            "a25bea736e30d166cdddb491f175f624",
            "2646ac647ad5339dbf082846283269ea",
            "27ae3e4e09519cfbb04c329615203637",
        ),
    ),
    "fashion-mnist": _idx_sources(
        "fashion-mnist",
        FASHION_URL,
        {
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d": 26_421_880,
            "25c81989df183df01b3e8a0aad5dffbe": 29_515,
            "bef4ecab320f06d8554ea6380940ec79": 4_422_102,
            "bb300cfdad3c16e7a12a480ee83cd310": 5_148,
        },
        (None, None, None, None),
    ),
    "cifar10": [
        Source(
            url=f"{CIFAR_URL}/cifar-10-binary.tar.gz",
            size=170_052_171,
            md5="c32a1d4ab5d03f1284b67883e8d87530",
            files=tuple(
                File(name=f"{CIFAR_FOLDER}/{name}", size=CIFAR_IMAGES * CIFAR_RECORD)
                for name in (*CIFAR_TRAIN, CIFAR_TEST)
            ),
        )
    ],
    "python-source": [],  # on every machine
}


def fetch(
    name: str,
    folder: Path,
    *,
    sources: Mapping[str, list[Source]] = OFFICIAL,
    progress: Progress | None = None,
) -> list[Path]:
    """Download the missing and damaged files of a data set. Returns all of its files, unpacked.

    A download ends at its published size, and is used only if its md5 is right. A file appears complete or not at all.

    Args:
        name: a task; `mnist-10k` is bundled, `python-source` comes with Python, and both have no files.
        folder: the data folder; created if it does not exist.
        sources: the downloads of each task.
        progress: called with the file, the bytes so far and the total bytes.

    """
    check_name("task", name, sources)
    report = progress or (lambda *_: None)
    for source in sources[name]:
        states = [check(file, folder, name) for file in source.files]
        if set(states) != {"ok"}:
            _fetch_source(source, folder, name, report)
    return [find(folder, file.name, task=name) for file in _files(sources[name])]


def verify(
    name: str,
    folder: Path,
    *,
    sources: Mapping[str, list[Source]] = OFFICIAL,
) -> dict[str, str]:
    """The state of each file of a data set: "ok", "missing", or the difference from the official file."""
    check_name("task", name, sources)
    return {file.name: check(file, folder, name) for file in _files(sources[name])}


def _files(sources: Iterable[Source]) -> list[File]:
    return [file for source in sources for file in source.files]


def check(file: File, folder: Path, task: str) -> str:
    """The state of one file, plain or as .gz: "ok", "missing", or the difference from the official one."""
    try:
        path = find(folder, file.name, task=task)
    except DataError:
        return "missing"
    try:
        return difference(file, read_bytes(path)) or "ok"
    except DataError as error:
        return str(error)


def difference(file: File, content: bytes | bytearray) -> str | None:
    """The first difference between a content and the expected one; None: they agree."""
    if len(content) != file.size:
        return f"{len(content):,} bytes, wanted {file.size:,}"
    found = md5(content)
    if file.md5 not in (None, found):
        return f"md5 {found}, wanted {file.md5}"
    return None


def _fetch_source(source: Source, folder: Path, task: str, progress: Progress) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as archive:  # has no name: a killed process leaves nothing
            _download(source, archive, progress)
            for file, content in _unpack(source, archive):
                path = folder / file.name
                path.parent.mkdir(exist_ok=True)
                write_atomically(path, content)
    except OSError as error:
        raise DataError(f"cannot write to {folder} ({error}); make room or use another folder") from error
    except DataError as error:
        names = ", ".join(file.name for file in source.files)
        raise DataError(
            f"{error}. Run `signvote data {task} --data-dir {folder}` again,"
            f" or put the official files there: {names}"
        ) from error


def _download(source: Source, archive: IO[bytes], progress: Progress) -> None:
    """Write the download into a file; raise if it is longer than published, or if its md5 is wrong."""
    name = source.url.rpartition("/")[2]
    checksum = hashlib.md5(usedforsecurity=False)
    for chunk in _chunks(source.url):
        checksum.update(chunk)
        archive.write(chunk)
        progress(name, archive.tell(), source.size)
        if archive.tell() > source.size:
            raise DataError(
                f"{source.url} has more than the {source.size:,} bytes that are published; nothing is kept"
            )
    found = checksum.hexdigest()
    if found != source.md5:
        raise DataError(
            f"{source.url} came as {archive.tell():,} bytes with md5 {found},"
            f" wanted {source.md5}: cut short or changed, and not kept"
        )


def _chunks(url: str) -> Iterator[bytes]:
    """The chunks of a download."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as reply:
            while chunk := reply.read(CHUNK_BYTES):
                yield chunk
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it holds the connection
        raise DataError(f"cannot download {url} ({error})") from error


def _unpack(source: Source, archive: IO[bytes]) -> Iterator[tuple[File, bytes]]:
    """The checked files of a download."""
    try:
        for file, content in _contents(source, archive):
            wrong = difference(file, content)
            if wrong:
                raise DataError(f"{source.url} holds a wrong {file.name}: {wrong}")
            yield file, content
    except (KeyError, tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(f"{source.url} cannot be unpacked ({error})") from error


def _contents(source: Source, archive: IO[bytes]) -> Iterator[tuple[File, bytes]]:
    """The contents of a download under the expected names. Other members of a tar are never touched."""
    archive.seek(0)
    if not source.url.endswith(".tar.gz"):
        with gzip.open(archive) as single:
            yield source.files[0], single.read()
        return
    with tarfile.open(fileobj=archive, mode="r:gz") as tar:
        for file in source.files:
            member = tar.extractfile(file.name)
            content = member.read() if member else b""
            yield file, content
