"""Tasks: official files read strictly, downloads on a local server, models, how inputs are prepared."""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import os
import shutil
import struct
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from signvote.errors import ConfigError, DataError
from signvote.tasks import MODELS, TASKS, Data, Task, files, load_task
from signvote.tasks.augment import crop_and_flip
from signvote.tasks.download import OFFICIAL, File, Source, fetch, verify
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


def tiny_task(**changes: Any) -> Task:
    data = Data(inputs=images(7, 2, 4, 4), labels=LABELS)
    settings: dict[str, Any] = {"name": "tiny", "train": data, "test": data, "model": nn.Flatten}
    return Task(**(settings | {"mean": (0.5, 0.25), "deviation": (0.5, 2.0)} | changes))


def parameters(name: str) -> int:
    return sum(p.numel() for p in MODELS[name]().parameters())


# Data and Task


def test_a_users_own_task_takes_a_few_lines() -> None:
    points = torch.randn(200, 2)
    data = Data(inputs=points, labels=(points.sum(1) > 0).long())
    task = Task(name="half-planes", train=data, test=data, model=lambda: nn.Linear(2, 2))

    model = task.model()
    first = task.loss(model(task.prepare(data.inputs)), data.labels)
    for _ in range(50):
        loss = task.loss(model(task.prepare(data.inputs, torch.Generator())), data.labels)
        for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            p.data -= 0.5 * g
    assert len(task.train) == 200
    assert loss < 0.5 * first


@pytest.mark.parametrize(
    ("inputs", "labels", "text"),
    [
        (torch.zeros(3, 2), torch.zeros(4, dtype=torch.int64), "3 inputs and 4 labels; they must be as many"),
        (torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), "0 inputs and 0 labels; .* at least 1"),
        (torch.tensor(1.0), torch.zeros(1, dtype=torch.int64), "0 inputs and 1 labels"),
        (torch.zeros(3, 2), torch.zeros(3), r"labels are torch.float32 of shape \(3,\); .* torch.int64"),
        (torch.zeros(3, 2), torch.zeros(3, 1, dtype=torch.int64), r"shape \(3, 1\); .* shape \(n,\)"),
    ],
)
def test_data_that_does_not_fit_together(inputs: Tensor, labels: Tensor, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Data(inputs=inputs, labels=labels)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mean": (0.5,)}, "1 means and 2 deviations for inputs with 2 channels; uint8 images"),
        ({"deviation": ()}, "2 means and 0 deviations"),
        ({"mean": (), "deviation": ()}, "0 means and 0 deviations for inputs with 2 channels"),
        ({"deviation": (1.0, 0.0)}, r"deviation is \(1.0, 0.0\); every one must be above 0"),
        ({"chunk": 0}, "chunk is 0; it must be 1 or more, or None"),
        (
            {"test": Data(inputs=images(7, 2, 5, 4), labels=LABELS)},
            r"training input has shape \(2, 4, 4\), a test input \(2, 5, 4\)",
        ),
        ({"test": Data(inputs=torch.zeros(7, 2, 4, 4), labels=LABELS)}, "2 means .* other inputs none"),
    ],
)
def test_a_task_that_does_not_fit_together(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        tiny_task(**changes)


def test_images_are_normalised_per_channel_and_lie_channels_last() -> None:
    task = tiny_task()
    x = task.prepare(task.train.inputs)
    mean, deviation = torch.tensor([0.5, 0.25])[:, None, None], torch.tensor([0.5, 2.0])[:, None, None]
    assert x.dtype == torch.float32
    assert x.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(x, (task.train.inputs.double() / 255 - mean).div(deviation).float())


def test_images_of_one_channel_lie_channels_last_too() -> None:
    """Their bytes are the same either way, but convolutions choose their way by the strides."""
    x = load_task("mnist-10k").prepare(images(3, 1, 28, 28))
    assert x.stride() == (784, 1, 28, 1)


@pytest.mark.parametrize(
    "inputs", [torch.randn(7, 5), torch.arange(14).reshape(7, 2), torch.randn(7, 3, 2, 2)]
)
def test_other_inputs_are_used_as_they_are(inputs: Tensor) -> None:
    data = Data(inputs=inputs, labels=LABELS)
    x = Task(name="own", train=data, test=data, model=nn.Flatten).prepare(inputs)
    assert torch.equal(x, inputs)
    assert x.dtype == inputs.dtype
    assert x.ndim != 4 or x.is_contiguous(memory_format=torch.channels_last)


def test_only_training_augments() -> None:
    task = tiny_task(augment=lambda inputs, generator: torch.zeros_like(inputs))
    inputs = images(7, 2, 4, 4)
    assert torch.equal(task.prepare(inputs), tiny_task().prepare(inputs))
    assert torch.equal(task.prepare(inputs, torch.Generator()), task.prepare(torch.zeros_like(inputs)))


def test_the_loss_is_the_mean_cross_entropy() -> None:
    outputs = torch.randn(7, 3)
    expected = -outputs.log_softmax(1)[torch.arange(7), LABELS].mean()
    torch.testing.assert_close(tiny_task().loss(outputs, LABELS), expected)


# augmentation


def windows(image: Tensor) -> list[Tensor]:
    """Every crop of the padded image, plain and mirrored."""
    padded = F.pad(image, [4] * 4)
    height, width = image.shape[1:]
    crops = [padded[:, y : y + height, x : x + width] for y in range(9) for x in range(9)]
    return crops + [crop.flip(-1) for crop in crops]


def test_augmented_images_are_windows_of_the_padded_one() -> None:
    batch = images(40, 3, 8, 6)
    out = crop_and_flip(batch, torch.Generator().manual_seed(1))
    assert out.shape == batch.shape
    assert out.dtype == torch.uint8
    seen = [
        [torch.equal(new, w) for w in windows(old)].index(True) for old, new in zip(batch, out, strict=True)
    ]
    assert len(set(seen)) > 20  # of 162 windows, drawn 40 times
    assert {index >= 81 for index in seen} == {False, True}


def test_every_window_is_as_likely() -> None:
    """The place a single white pixel moves to: 9 x 9 places, each as often."""
    n = 81 * 400
    batch = torch.zeros(n, 1, 9, 9, dtype=torch.uint8)
    batch[:, :, 4, 4] = 1
    out = crop_and_flip(batch, torch.Generator().manual_seed(2))
    counts = out.sum((0, 1), dtype=torch.int64)
    assert int(counts.sum()) == n
    assert int((counts - 400).abs().max()) < 5 * 20  # five standard deviations


def test_augmentation_depends_on_the_generator_only() -> None:
    batch = images(10, 3, 32, 32)
    one, again, other = (crop_and_flip(batch, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    torch.manual_seed(5)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


# models


@pytest.mark.parametrize(
    ("name", "count", "shape"),
    [
        ("mnist-cnn", 582_026, (1, 28, 28)),
        ("resnet20", 269_722, (3, 32, 32)),
        ("resnet56", 853_018, (3, 32, 32)),
        ("mlp", 784 * 64 + 64 + 64 * 10 + 10, (1, 28, 28)),
    ],
)
def test_parameters_and_outputs(name: str, count: int, shape: tuple[int, ...]) -> None:
    assert parameters(name) == count
    assert MODELS[name]()(torch.randn(5, *shape)).shape == (5, 10)
    assert not list(MODELS[name]().buffers())  # nothing that an update by votes would miss


def test_every_model_is_tested() -> None:
    assert set(MODELS) == {"mnist-cnn", "resnet20", "resnet56", "mlp"}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_fresh_and_the_callers_seed_decides(name: str) -> None:
    def weights(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return torch.cat([p.detach().flatten() for p in MODELS[name]().parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def relu_before_pooling(model: nn.Module, x: Tensor) -> Tensor:
    """The paper's CNN as the paper writes it."""
    x = F.max_pool2d(F.relu(model.get_submodule("conv1")(x)), 2)
    x = F.max_pool2d(F.relu(model.get_submodule("conv2")(x)), 2)
    x = F.relu(model.get_submodule("fc1")(x.flatten(1)))
    out: Tensor = model.get_submodule("fc2")(x)
    return out


def test_relu_after_pooling_changes_no_gradient() -> None:
    task = load_task("mnist-10k")
    model, x, labels = task.model(), task.prepare(task.train.inputs[:32]), task.train.labels[:32]
    grads = [
        torch.autograd.grad(task.loss(outputs, labels), list(model.parameters()))
        for outputs in (model(x), relu_before_pooling(model, x))
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
        assert torch.equal(a == 0, b == 0)


def test_a_resnet_normalises_by_the_batch_also_in_evaluation() -> None:
    model, x = MODELS["resnet20"](), torch.randn(8, 3, 32, 32)
    trained = model.train()(x)
    assert torch.equal(model.eval()(x), trained)
    assert not torch.allclose(model(x[:4]), trained[:4])


def test_a_shortcut_keeps_every_second_pixel_and_adds_zero_channels() -> None:
    block = MODELS["resnet20"]().get_submodule("blocks.3")
    for parameter in block.parameters():
        nn.init.zeros_(parameter)  # the shortcut is all that is left
    x = torch.rand(2, 16, 8, 8)
    out = block(x)
    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2])
    assert not out[:, :8].any()
    assert not out[:, 24:].any()


def test_resnet_weights_start_kaiming_normal() -> None:
    weight = MODELS["resnet20"]().get_parameter("blocks.8.conv2.weight").detach()
    assert float(weight.std()) == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.03)


# the bundled data


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
    assert (task.mean, task.deviation, task.chunk, task.augment) == ((0.1307,), (0.3081,), 64, None)
    assert parameters("mnist-cnn") == sum(p.numel() for p in task.model().parameters())


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
    assert (task.name, task.chunk, task.mean) == (name, 64, (0.1307,))


def test_cifar_files_round_trip(tmp_path: Path) -> None:
    records = write_cifar(tmp_path / "cifar-10-batches-bin")
    task = load_task("cifar10", tmp_path, model="resnet56")
    assert task.train.inputs.shape == (50_000, 3, 32, 32)
    assert task.test.inputs.shape == (10_000, 3, 32, 32)
    assert torch.equal(task.train.inputs[20_000:30_000].flatten(1), records[:, 1:])
    assert torch.equal(task.test.labels, records[:, 0].long())
    assert (task.chunk, task.augment, len(task.mean)) == (None, crop_and_flip, 3)
    assert sum(p.numel() for p in task.model().parameters()) == 853_018
    assert verify("cifar10", tmp_path) == {
        f"cifar-10-batches-bin/{n}.bin": "ok"
        for n in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    }


def test_a_model_other_than_the_tasks_own(tmp_path: Path) -> None:
    write_cifar(tmp_path / "cifar-10-batches-bin")
    task = load_task("cifar10", tmp_path, model="mlp")
    assert task.model()(task.prepare(task.train.inputs[:2])).shape == (2, 10)
    assert task.chunk == 64


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("mnits",), "there is no task 'mnits'; did you mean 'mnist'. All: mnist-10k, mnist, fashion-mnist"),
        (("quux",), r"there is no task 'quux'\. All: "),
        (("mnist", None, "resnet-20"), "there is no model 'resnet-20'; did you mean 'resnet20'"),
        (
            ("mnist", None, "resnet20"),
            "'resnet20' takes images of 3 x 32 x 32, these have 1 x 28 x 28; for them take mnist-cnn or mlp",
        ),
        (("cifar10", None, "mnist-cnn"), "for them take resnet20 or resnet56 or mlp"),
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


class Web:
    """A web server on this machine; pages by path, and the paths that were asked for."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Page, self))
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def source(self, path: str, content: bytes, *expected: File) -> Source:
        """A page, and the source that it is for `fetch`."""
        self.pages[f"/{path}"] = content
        return Source(url=f"{self.url}/{path}", md5=hashlib.md5(content).hexdigest(), files=expected)


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
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

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
    gone = Source(url="http://127.0.0.1:0/a.gz", md5="", files=(File(name="a", size=1),))
    with pytest.raises(DataError, match=r"cannot download http://127.0.0.1:0/a.gz \("):
        fetch("gone", tmp_path, sources={"gone": [gone]})
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
        DataError, match=r"cannot write to .*file/data \(.*\); make room or take another folder"
    ):
        fetch("two", tmp_path / "file" / "data", sources=two)


def test_every_task_has_its_sources(tmp_path: Path) -> None:
    assert set(OFFICIAL) == set(TASKS)
    assert fetch("mnist-10k", tmp_path) == []
    for sources in OFFICIAL.values():
        assert all(len(source.md5) == 32 for source in sources)
        assert all(len(file.md5 or 32 * "0") == 32 for source in sources for file in source.files)


@pytest.mark.parametrize("function", [fetch, verify])
def test_an_unknown_data_set(tmp_path: Path, function: Any) -> None:
    with pytest.raises(ConfigError, match="there is no task 'cifar'; did you mean 'cifar10'"):
        function("cifar", tmp_path)
