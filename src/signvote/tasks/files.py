"""The official files of the data sets: their places, and readers that refuse damaged files.

DIR/mnist/{train,t10k}-{images-idx3,labels-idx1}-ubyte            MNIST, IDX files, also as .gz
DIR/fashion-mnist/                                                Fashion-MNIST, the same names
DIR/cifar-10-batches-bin/{data_batch_1..5,test_batch}.bin         CIFAR-10, binary version

DIR is the given folder, else the environment variable SIGNVOTE_DATA, else ~/.cache/signvote.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import math
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from signvote.errors import DataError
from signvote.tasks.data import Data
from signvote.tasks.models import CIFAR_SHAPE, CLASSES, MNIST_SHAPE

IDX_TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
IDX_TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
IDX_UBYTE = 0x08  # code of unsigned bytes, the only element type that is read

CIFAR_FOLDER = "cifar-10-batches-bin"
CIFAR_TRAIN = (
    "data_batch_1.bin",
    "data_batch_2.bin",
    "data_batch_3.bin",
    "data_batch_4.bin",
    "data_batch_5.bin",
)
CIFAR_TEST = "test_batch.bin"
CIFAR_IMAGES = 10_000  # in each file
CIFAR_RECORD = 1 + math.prod(CIFAR_SHAPE)  # bytes: a label, then red, green and blue planes

CHUNK_BYTES = 1 << 20

BUNDLED = Path(__file__).parent / "mnist10k"
BUNDLED_TRAIN = 8_000
BUNDLED_MD5 = {
    "t10k-images-idx3-ubyte.xz": "2646ac647ad5339dbf082846283269ea",  # of the file in the .xz
    "t10k-labels-idx1-ubyte.xz": "27ae3e4e09519cfbb04c329615203637",
}

OPEN: dict[str, Any] = {  # by suffix
    ".gz": gzip.open,
    ".xz": lzma.open,
}
MOST_BYTES = 2**27  # of an unpacked file; the largest official one has 47 million


def data_folder(given: Path | str | None = None) -> Path:
    """The folder of the data sets: see the module's docstring."""
    folder = given or os.environ.get("SIGNVOTE_DATA") or "~/.cache/signvote"
    return Path(folder).expanduser()


def read_mnist(folder: Path, task: str) -> tuple[Data, Data]:
    """Training and test data of MNIST or a look-alike, from the four IDX files in folder/task."""
    train = [find(folder, f"{task}/{name}", task=task) for name in IDX_TRAIN]
    test = [find(folder, f"{task}/{name}", task=task) for name in IDX_TEST]
    return mnist_data(*train), mnist_data(*test)


def read_cifar10(folder: Path) -> tuple[Data, Data]:
    """Training and test data of CIFAR-10, from the six files of its binary version."""
    names = [f"{CIFAR_FOLDER}/{name}" for name in (*CIFAR_TRAIN, CIFAR_TEST)]
    paths = [find(folder, name, task="cifar10") for name in names]
    *train, test = [cifar_data(path) for path in paths]
    inputs = torch.cat([data.inputs for data in train])
    labels = torch.cat([data.labels for data in train])
    return Data(inputs=inputs, labels=labels), test


def read_bundled() -> tuple[Data, Data]:
    """MNIST's 10,000 t10k images, bundled with signvote: the first 8,000 for training, the others for tests."""
    paths = [BUNDLED / name for name in BUNDLED_MD5]
    for path in paths:
        if md5(read_bytes(path)) != BUNDLED_MD5[path.name]:
            raise DataError(f"{path} is not the file that comes with signvote; reinstall signvote")
    data = mnist_data(*paths)
    inputs = data.inputs.tensor_split([BUNDLED_TRAIN])
    labels = data.labels.tensor_split([BUNDLED_TRAIN])
    train = Data(inputs=inputs[0], labels=labels[0])
    test = Data(inputs=inputs[1], labels=labels[1])
    return train, test


def find(folder: Path, name: str, *, task: str) -> Path:
    """The file folder/name, or folder/name.gz."""
    plain = folder / name
    packed = folder / f"{name}.gz"
    for path in (plain, packed):
        if os.path.exists(path):  # False, not an error, in a folder without permission
            return path
    raise DataError(
        f"task {task!r} needs {plain.name}, which is missing:"
        f" there is neither {plain} nor {packed}."
        f" Run `signvote data {task} --data-dir {folder}`,"
        f" or put the official files into {plain.parent}"
    )


def mnist_data(images: Path, labels: Path) -> Data:
    """The data in an IDX file of images and one of their labels."""
    pixels = read_idx(images, 3)
    digits = read_idx(labels, 1)
    shape = tuple(pixels.shape[1:])
    if shape != MNIST_SHAPE[1:]:
        raise _damaged(images, f"has images of {shape} pixels, not 28 x 28")
    n = len(pixels)
    if n != len(digits) or n == 0:
        raise DataError(
            f"{images} has {n} images and {labels} {len(digits)} labels;"
            " they must be as many, at least 1. Put the official files there."
        )
    inputs = pixels[:, None]
    return Data(inputs=inputs, labels=checked_labels(labels, digits))


def cifar_data(path: Path) -> Data:
    """The 10,000 images in one file of CIFAR-10's binary version."""
    content = read_bytes(path)
    check_size(path, len(content), CIFAR_IMAGES * CIFAR_RECORD)
    records = torch.frombuffer(content, dtype=torch.uint8)
    records = records.reshape(CIFAR_IMAGES, CIFAR_RECORD)
    inputs = records[:, 1:]
    inputs = inputs.reshape(CIFAR_IMAGES, *CIFAR_SHAPE)
    labels = checked_labels(path, records[:, 0])
    return Data(inputs=inputs, labels=labels)


def read_idx(path: Path, dimensions: int) -> Tensor:
    """The array in an IDX file of unsigned bytes, plain, .gz or .xz.

    The file has two zero bytes, the element type (8: unsigned byte) and the number of dimensions. Then come
    the dimensions, 4 bytes each, most significant byte first, then the elements and nothing else.
    """
    content = read_bytes(path)
    magic = bytes([0, 0, IDX_UBYTE, dimensions])
    header = 4 + 4 * dimensions
    start = content[:4]
    if start != magic or len(content) < header:
        raise _damaged(
            path,
            f"has {len(content)} bytes and starts with {start.hex(' ')!r};"
            f" an IDX file of {dimensions} dimensions starts with {magic.hex(' ')!r}"
            f" and has at least {header}",
        )
    big_endian = f">{dimensions}I"
    shape = struct.unpack(big_endian, content[4:header])
    size = header + math.prod(shape)
    check_size(path, len(content), size)
    elements = torch.frombuffer(content, dtype=torch.uint8)[header:]
    return elements.reshape(shape)


def read_bytes(path: Path) -> bytearray:
    """The content of a file, unpacked if its name ends in .gz or .xz. A file of more than MOST_BYTES is refused."""
    opened = OPEN.get(path.suffix, open)
    content = bytearray()
    try:
        with opened(path, "rb") as file:
            while len(content) <= MOST_BYTES and (chunk := file.read(CHUNK_BYTES)):
                content += chunk
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise _damaged(path, f"cannot be read ({error})") from error
    if len(content) > MOST_BYTES:
        raise _damaged(path, f"has more than {MOST_BYTES:,} bytes")
    return content


def md5(content: bytes | bytearray) -> str:
    """The checksum that the data sets publish."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def check_size(path: Path, size: int, wanted: int) -> None:
    """Refuse a file that is too short or too long."""
    if size != wanted:
        what = "cut short" if size < wanted else "too long"
        raise _damaged(path, f"is {what}: {size:,} bytes, wanted {wanted:,}")


def checked_labels(path: Path, labels: Tensor) -> Tensor:
    """Labels as int64. Refuse a file with a label that names no class."""
    largest = int(labels.max())
    if largest >= CLASSES:
        raise _damaged(path, f"has a label {largest}; labels are 0 to {CLASSES - 1}")
    return labels.long()


def _damaged(path: Path, problem: str) -> DataError:
    advice = "Remove it, and fetch it again with `signvote data` or put the official file there."
    return DataError(f"{path} {problem}. {advice}")
