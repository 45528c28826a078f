"""The official files of the data sets: where they lie, and readers that refuse what is damaged.

DIR/mnist/{train,t10k}-{images-idx3,labels-idx1}-ubyte            MNIST, IDX files, also as .gz
DIR/fashion-mnist/                                                Fashion-MNIST, the same names
DIR/cifar-10-batches-bin/{data_batch_1..5,test_batch}.bin         CIFAR-10, binary version

DIR is the folder asked for, else the environment variable SIGNVOTE_DATA, else ~/.cache/signvote.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import math
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from signvote.errors import DataError
from signvote.tasks.models import CIFAR_SHAPE, CLASSES, MNIST_SHAPE
from signvote.tasks.task import Data

IDX_TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
IDX_TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
IDX_UBYTE = 0x08  # the code of the only element type read here

CIFAR_FOLDER = "cifar-10-batches-bin"
CIFAR_TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
CIFAR_TEST = "test_batch.bin"
CIFAR_IMAGES = 10_000  # in each file
CIFAR_RECORD = 1 + math.prod(CIFAR_SHAPE)  # bytes: a label, then red, green and blue planes

BUNDLED = Path(__file__).parent / "mnist10k"
BUNDLED_TRAIN = 8_000
BUNDLED_MD5 = {
    "t10k-images-idx3-ubyte.xz": "2646ac647ad5339dbf082846283269ea",  # of the file in the .xz
    "t10k-labels-idx1-ubyte.xz": "27ae3e4e09519cfbb04c329615203637",
}

REPLACE = "Remove it, and fetch it again with `signvote data` or put the official file there."


def data_folder(asked: Path | None = None) -> Path:
    """The folder that holds the data sets: see the module's text."""
    return Path(asked or os.environ.get("SIGNVOTE_DATA") or "~/.cache/signvote").expanduser()


def read_mnist(folder: Path, task: str) -> tuple[Data, Data]:
    """Training and test data of MNIST or a look-alike, from the four IDX files in folder/task."""
    files = [find(folder, f"{task}/{name}", task=task) for name in IDX_TRAIN + IDX_TEST]
    return mnist_data(*files[:2]), mnist_data(*files[2:])


def read_cifar10(folder: Path) -> tuple[Data, Data]:
    """Training and test data of CIFAR-10, from the six files of its binary version."""
    names = [f"{CIFAR_FOLDER}/{name}" for name in (*CIFAR_TRAIN, CIFAR_TEST)]
    *train, test = [cifar_data(path) for path in [find(folder, name, task="cifar10") for name in names]]
    inputs, labels = torch.cat([data.inputs for data in train]), torch.cat([data.labels for data in train])
    return Data(inputs=inputs, labels=labels), test


def read_bundled() -> tuple[Data, Data]:
    """MNIST's 10,000 t10k images, bundled with signvote: the first 8,000 to train, the last 2,000 to test."""
    paths = [BUNDLED / name for name in BUNDLED_MD5]
    for path in paths:
        if hashlib.md5(read_bytes(path), usedforsecurity=False).hexdigest() != BUNDLED_MD5[path.name]:
            raise DataError(f"{path} is not the file that comes with signvote; reinstall signvote")
    data = mnist_data(*paths)
    inputs, labels = data.inputs.tensor_split([BUNDLED_TRAIN]), data.labels.tensor_split([BUNDLED_TRAIN])
    return Data(inputs=inputs[0], labels=labels[0]), Data(inputs=inputs[1], labels=labels[1])


def find(folder: Path, name: str, *, task: str) -> Path:
    """The file folder/name, or folder/name.gz."""
    places = [folder / name, folder / f"{name}.gz"]
    for path in places:
        if os.path.exists(path):  # False, not an error, where we may not look
            return path
    raise DataError(
        f"task {task!r} needs {places[0].name}, which is missing: there is neither {places[0]}"
        f" nor {places[1]}."
        f" Run `signvote data {task} --data-dir {folder}`, or put the official files into {places[0].parent}"
    )


def mnist_data(images: Path, labels: Path) -> Data:
    """The data in an IDX file of images and one of their labels."""
    pixels, digits = read_idx(images, 3), read_idx(labels, 1)
    if tuple(pixels.shape[1:]) != MNIST_SHAPE[1:]:
        raise DataError(f"{images} has images of {tuple(pixels.shape[1:])} pixels, not 28 x 28. {REPLACE}")
    if len(pixels) != len(digits) or not len(digits):
        raise DataError(
            f"{images} has {len(pixels)} images and {labels} {len(digits)} labels; they must be as many,"
            " at least 1. Put the official files there."
        )
    return Data(inputs=pixels[:, None], labels=checked_labels(labels, digits))


def cifar_data(path: Path) -> Data:
    """The 10,000 images in one file of CIFAR-10's binary version."""
    content = read_bytes(path)
    check_size(path, len(content), CIFAR_IMAGES * CIFAR_RECORD)
    records = torch.frombuffer(content, dtype=torch.uint8).reshape(-1, CIFAR_RECORD)
    return Data(inputs=records[:, 1:].reshape(-1, *CIFAR_SHAPE), labels=checked_labels(path, records[:, 0]))


def read_idx(path: Path, dimensions: int) -> Tensor:
    """The array in an IDX file of unsigned bytes, plain, .gz or .xz.

    The file: two zero bytes, the element type (8: unsigned byte), the number of dimensions; each
    dimension as 4 bytes, the most significant first; then the elements and nothing else.
    """
    content = read_bytes(path)
    magic, header = bytes([0, 0, IDX_UBYTE, dimensions]), 4 + 4 * dimensions
    if content[:4] != magic or len(content) < header:
        raise DataError(
            f"{path} has {len(content)} bytes and starts with {content[:4].hex(' ')!r}; an IDX file of"
            f" {dimensions} dimensions starts with {magic.hex(' ')!r} and has at least {header}. {REPLACE}"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    check_size(path, len(content), header + math.prod(shape))
    return torch.frombuffer(content, dtype=torch.uint8)[header:].reshape(shape)


def read_bytes(path: Path) -> bytearray:
    """A file's content, unpacked if its name ends in .gz or .xz."""
    unpack = UNPACK.get(path.suffix, bytes)
    try:
        return bytearray(unpack(path.read_bytes()))
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path} cannot be read ({error}). {REPLACE}") from error


UNPACK: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.decompress, ".xz": lzma.decompress}


def check_size(path: Path, size: int, wanted: int) -> None:
    """Refuse a file that is too short or too long."""
    if size != wanted:
        what = "cut short" if size < wanted else "too long"
        raise DataError(f"{path} is {what}: {size:,} bytes, wanted {wanted:,}. {REPLACE}")


def checked_labels(path: Path, labels: Tensor) -> Tensor:
    """Labels as int64; a file with one that names no class is refused."""
    if int(labels.max()) >= CLASSES:
        raise DataError(f"{path} has a label {int(labels.max())}; labels are 0 to {CLASSES - 1}. {REPLACE}")
    return labels.long()
