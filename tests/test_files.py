"""Official data files, read strictly; the bundled one."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from signvote.errors import ConfigError, DataError
from signvote.tasks import files, load_task
from signvote.tasks.augment import crop_and_flip
from signvote.tasks.download import verify
from signvote.tasks.files import cifar_data, data_folder, mnist_data, read_idx

CIFAR_BYTES = 10_000 * 3073
LABELS = torch.arange(7) % 3


def idx_bytes(array: Tensor) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.numpy().tobytes()


def images(n: int, *shape: int) -> Tensor:
    return torch.randint(256, (n, *shape), dtype=torch.uint8)


def write_mnist(folder: Path, n: int = 7, *, packed: bool = False) -> dict[str, Tensor]:
    """Made-up IDX files under the official names."""
    arrays = {}
    folder.mkdir(parents=True)
    for part in ("train", "t10k"):
        arrays[f"{part}-images-idx3-ubyte"] = images(n, 28, 28)
        arrays[f"{part}-labels-idx1-ubyte"] = images(n) % 10
    for name, array in arrays.items():
        content = idx_bytes(array)
        (folder / (name + packed * ".gz")).write_bytes(gzip.compress(content) if packed else content)
    return arrays


def write_cifar(folder: Path) -> Tensor:
    """Six made-up files of CIFAR-10's binary version; the records of the first."""
    folder.mkdir(parents=True)
    records = images(10_000, 3073)
    records[:, 0] %= 10
    first = folder / "data_batch_1.bin"
    first.write_bytes(records.numpy().tobytes())
    for name in [*(f"data_batch_{i}.bin" for i in range(2, 6)), "test_batch.bin"]:
        os.link(first, folder / name)
    return records


def test_the_bundled_data_is_mnists_test_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIGNVOTE_DATA", "/nowhere/at/all")
    task = load_task("mnist-10k")
    assert task.train.inputs.shape == (8000, 1, 28, 28)
    assert task.test.inputs.shape == (2000, 1, 28, 28)
    labels = torch.cat([task.train.labels, task.test.labels])
    assert labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert labels[:5].tolist() == [7, 2, 1, 0, 4]
    whole = torch.cat([task.train.inputs, task.test.inputs]).squeeze(1)
    assert hashlib.md5(idx_bytes(whole)).hexdigest() == "2646ac647ad5339dbf082846283269ea"
    assert hashlib.md5(idx_bytes(labels.byte())).hexdigest() == "27ae3e4e09519cfbb04c329615203637"
    assert (task.mean, task.deviation, task.samples_per_pass, task.augment) == (
        (0.1307,),
        (0.3081,),
        64,
        None,
    )
    assert sum(p.numel() for p in task.model().parameters()) == 582_026


def test_the_bundled_data_is_small_and_attributed() -> None:
    assert sum(path.stat().st_size for path in files.BUNDLED.glob("*.xz")) < 1_700_000
    text = (files.BUNDLED / "README.md").read_text()
    for word in ("LeCun", "Cortes", "Burges", "CC BY-SA 3.0", *files.BUNDLED_MD5.values()):
        assert word in text


def test_damaged_bundled_data_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(files.BUNDLED, tmp_path, dirs_exist_ok=True)
    (tmp_path / "t10k-labels-idx1-ubyte.xz").write_bytes(lzma.compress(idx_bytes(images(10_000) % 10)))
    monkeypatch.setattr(files, "BUNDLED", tmp_path)
    with pytest.raises(DataError, match=r"t10k-labels.* is not the file that comes with signvote; reinstall"):
        load_task("mnist-10k")


# official files


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_files_round_trip(tmp_path: Path, name: str, packed: bool) -> None:
    arrays = write_mnist(tmp_path / name, packed=packed)
    task = load_task(name, tmp_path)
    for data, part in ((task.train, "train"), (task.test, "t10k")):
        assert torch.equal(data.inputs, arrays[f"{part}-images-idx3-ubyte"][:, None])
        assert torch.equal(data.labels, arrays[f"{part}-labels-idx1-ubyte"].long())
    assert (task.name, task.samples_per_pass, task.mean) == (name, 64, (0.1307,))


def test_cifar_files_round_trip(tmp_path: Path) -> None:
    records = write_cifar(tmp_path / "cifar-10-batches-bin")
    task = load_task("cifar10", tmp_path, model="resnet56")
    assert task.train.inputs.shape == (50_000, 3, 32, 32)
    assert task.test.inputs.shape == (10_000, 3, 32, 32)
    assert torch.equal(task.train.inputs[20_000:30_000].flatten(1), records[:, 1:])
    assert torch.equal(task.test.labels, records[:, 0].long())
    assert (task.samples_per_pass, task.augment, len(task.mean)) == (None, crop_and_flip, 3)
    assert sum(p.numel() for p in task.model().parameters()) == 853_018
    assert verify("cifar10", tmp_path) == {
        f"cifar-10-batches-bin/{n}.bin": "ok"
        for n in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    }


def test_a_model_other_than_the_tasks_own(tmp_path: Path) -> None:
    write_cifar(tmp_path / "cifar-10-batches-bin")
    task = load_task("cifar10", tmp_path, model="mlp")
    assert task.model()(task.prepare(task.train.inputs[:2])).shape == (2, 10)
    assert task.samples_per_pass == 64


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("mnits",), "there is no task 'mnits'; did you mean 'mnist'. All: mnist-10k, mnist, fashion-mnist"),
        (("quux",), r"there is no task 'quux'\. All: "),
        (("mnist", None, "resnet-20"), "there is no model 'resnet-20'; did you mean 'resnet20'"),
        (
            ("mnist", None, "resnet20"),
            "'resnet20' takes images of 3 x 32 x 32, these have 1 x 28 x 28; for them use mnist-cnn or mlp",
        ),
        (("cifar10", None, "mnist-cnn"), "for them use resnet20 or resnet20-gn or resnet56 or mlp"),
    ],
)
def test_names_that_do_not_fit(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_task(*arguments)


def test_where_data_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SIGNVOTE_DATA", "~/data")
    assert data_folder(Path("given")) == Path("given")
    assert data_folder() == Path("/home/me/data")
    monkeypatch.setenv("SIGNVOTE_DATA", "")
    assert data_folder() == Path("/home/me/.cache/signvote")


@pytest.mark.parametrize(
    ("name", "missing"),
    [("mnist", "mnist/t10k-labels-idx1-ubyte"), ("cifar10", "cifar-10-batches-bin/data_batch_1.bin")],
)
def test_a_missing_file_is_named_with_every_place_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, missing: str
) -> None:
    monkeypatch.setenv("SIGNVOTE_DATA", str(tmp_path))
    write_mnist(tmp_path / "mnist")
    (tmp_path / missing).unlink(missing_ok=True)
    with pytest.raises(DataError) as caught:
        load_task(name)
    for part in (
        f"task '{name}' needs {Path(missing).name}, which is missing",
        f"neither {tmp_path / missing} nor {tmp_path / missing}.gz",
        f"`signvote data {name} --data-dir {tmp_path}`",
        f"put the official files into {(tmp_path / missing).parent}",
    ):
        assert part in str(caught.value)


GOOD = idx_bytes(torch.arange(6, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        (
            "a",
            b"",
            r"a has 0 bytes and starts with ''; an IDX file of 1 dimensions starts with '00 00 08 01'",
        ),
        ("a", b"\0\0\x08\x03" + GOOD[4:], "starts with '00 00 08 03'; .* '00 00 08 01'"),
        ("a", b"\0\0\x0d\x01" + GOOD[4:], "starts with '00 00 0d 01'"),
        ("a", GOOD[:7], "has 7 bytes .* at least 8"),
        ("a", GOOD[:-1], "a is cut short: 13 bytes, wanted 14. Remove it, and fetch it again"),
        ("a", GOOD + b"\0", "a is too long: 15 bytes, wanted 14"),
        ("a.gz", GOOD, r"a.gz cannot be read \(Not a gzipped file"),
        ("a.gz", gzip.compress(GOOD)[:-9], r"a.gz cannot be read \(Compressed file ended"),
        ("a.gz", gzip.compress(GOOD)[:10] + b"\xff" * 20, r"a.gz cannot be read \(Error -3"),
        ("a.xz", GOOD, r"a.xz cannot be read \(Input format not supported"),
    ],
    ids=[
        "empty",
        "dimensions",
        "type",
        "header",
        "short",
        "long",
        "no gzip",
        "short gzip",
        "bad gzip",
        "no xz",
    ],
)
def test_damaged_idx_files_are_refused(tmp_path: Path, name: str, content: bytes, text: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=text):
        read_idx(tmp_path / name, 1)


@pytest.mark.parametrize(("name", "pack"), [("a", bytes), ("a.gz", gzip.compress), ("a.xz", lzma.compress)])
def test_a_small_file_cannot_unpack_to_gigabytes(
    name: str, pack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MOST_BYTES", len(GOOD))
    (tmp_path / name).write_bytes(pack(GOOD))
    assert len(read_idx(tmp_path / name, 1)) == 6
    (tmp_path / name).write_bytes(pack(GOOD + b"\0"))
    with pytest.raises(DataError, match=f"{name} has more than 14 bytes. Remove it, and fetch it again"):
        read_idx(tmp_path / name, 1)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be read .*Is a directory"):
        read_idx(tmp_path, 1)


@pytest.mark.parametrize("array", [images(6), images(3, 2), images(2, 3, 4), images(0)])
def test_idx_arrays_of_any_dimensions(tmp_path: Path, array: Tensor) -> None:
    (tmp_path / "a").write_bytes(idx_bytes(array))
    assert torch.equal(read_idx(tmp_path / "a", array.ndim), array)


@pytest.mark.parametrize(
    ("pixels", "digits", "text"),
    [
        (images(3, 28, 27), LABELS[:3], r"has images of \(28, 27\) pixels, not 28 x 28"),
        (images(3, 28, 28), LABELS[:2], "has 3 images and .* 2 labels; they must be as many"),
        (images(0, 28, 28), LABELS[:0], "has 0 images and .* 0 labels; .* at least 1"),
        (images(3, 28, 28), LABELS[:3] + 8, "labels has a label 10; labels are 0 to 9"),
    ],
)
def test_images_and_labels_that_do_not_fit(tmp_path: Path, pixels: Tensor, digits: Tensor, text: str) -> None:
    (tmp_path / "images").write_bytes(idx_bytes(pixels))
    (tmp_path / "labels").write_bytes(idx_bytes(digits.byte()))
    with pytest.raises(DataError, match=text):
        mnist_data(tmp_path / "images", tmp_path / "labels")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (CIFAR_BYTES - 3073, "a.bin is cut short: 30,726,927 bytes, wanted 30,730,000"),
        (CIFAR_BYTES + 1, "a.bin is too long: 30,730,001 bytes"),
        (CIFAR_BYTES, "a.bin has a label 10; labels are 0 to 9"),
    ],
)
def test_damaged_cifar_files_are_refused(tmp_path: Path, size: int, text: str) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(bytes([10]))
    os.truncate(path, size)
    with pytest.raises(DataError, match=text):
        cifar_data(path)


# downloads
