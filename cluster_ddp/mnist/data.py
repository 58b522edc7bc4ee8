"""Images and labels: MNIST, Fashion-MNIST, files of the same kind, or the digits in the package.

The four files of a dataset are IDX files, where torchvision looks for them: two zero bytes, the type (8: bytes), the
number of dimensions, the dimensions in big-endian 32-bit numbers, the values (yann.lecun.com/exdb/mnist).

The digits are the 1,797 of "Optical Recognition of Handwritten Digits" (Alpaydin, Kaynak 1998; UCI Machine
Learning Repository, doi:10.24432/C50P49, CC BY 4.0), 8x8 pixels of 0 to 16, here scaled to 28x28 pixels of 0 to 255.

`submit` checks the files, so torch is imported only where tensors are made.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import math
import shlex
from importlib.resources import files as resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cluster_ddp.errors import DataError
from cluster_ddp.mnist.train_config import FOLDER, TrainConfig

if TYPE_CHECKING:
    import torch

    from cluster_ddp import ResidentSet, Shard, World

    Batch = tuple[torch.Tensor, torch.Tensor]

CLASSES = 10
# Mean and standard deviation of the training pixels, as fractions of white.
MNIST_STATISTICS = (0.1307, 0.3081)
DIGITS_STATISTICS = (0.3052, 0.3251)
DIGITS_TEST_EVERY = 5


def normalise(images: torch.Tensor, labels: torch.Tensor, *, mean: float, std: float) -> Batch:
    """Images from uint8 (N, 28, 28) to float32 (N, 1, 28, 28); labels as they are. Mean and std are fractions of 255.

    On the CPU the bits are those of torchvision's ToTensor and Normalize.
    """
    return images.unsqueeze(1).float().div_(255).sub_(mean).div_(std), labels


def shards(config: TrainConfig, batch_size: int, world: World) -> tuple[Shard, Shard]:
    """This rank's batches of the training set, with `batch_size` samples, and of the test set."""
    # One rank of each node reads all bytes for the digests. All ranks check that the files are there, and their sizes.
    train_set, test_set = load(config.dataset, config.data_dir, check_content=world.topology.local_rank == 0)
    kept: dict[str, Any] = {"resident_share": config.resident_share}
    loader: dict[str, Any] = {} if config.workers is None else {"num_workers": config.workers}
    train_shard = world.shard(train_set, batch_size=batch_size, shuffle_seed=config.seed, **kept, **loader)
    return train_shard, world.shard(test_set, batch_size=config.test_batch_size, **kept)


def load(name: str, data_dir: Path, *, check_content: bool = True) -> tuple[ResidentSet, ResidentSet]:
    """The training set and the test set: images, uint8 (N, 28, 28), normalised by batch, and labels, int64 (N,).

    "mnist" and "fashion" have 60,000 and 10,000 images, "digits" 1,437 and 360, "folder:PATH" any number.

    Raises:
        DataError: files are missing, damaged or of another kind.
    """
    if name == "digits":
        return _normalised(*_digits(), DIGITS_STATISTICS)
    check(data_dir, dataset=name, check_content=check_content)
    folder = raw_folder(data_dir, name)
    images, labels, test_images, test_labels = (folder / one.name for one in IDX_FILES)
    train, test = _read(images, labels), _read(test_images, test_labels)
    return _normalised(train, test, MNIST_STATISTICS if name == "mnist" else _statistics(train[0], images))


def _read(images_file: Path, labels_file: Path) -> Batch:
    import torch

    (count, *pixels), images = read_idx(images_file, 3)
    (labels_count,), labels = read_idx(labels_file, 1)
    asked = f"Reading {images_file} and {labels_file.name}:"
    if pixels != [28, 28] or count == 0:
        found = f"there are {count} images of {' x '.join(map(str, pixels))} pixels."
        raise DataError(asked, found, "the models take one image or more of 28 x 28 pixels")
    if count != labels_count:
        raise DataError(asked, f"there are {count} images and {labels_count} labels.", "give one label for each image")
    if (largest := max(labels)) >= CLASSES:
        raise DataError(asked, f"there is a label {largest}.", f"the models take labels from 0 to {CLASSES - 1}")
    numbers = torch.frombuffer(labels, dtype=torch.uint8).to(torch.int64)
    return torch.frombuffer(images, dtype=torch.uint8).view(-1, 28, 28), numbers


def _statistics(images: torch.Tensor, path: Path) -> tuple[float, float]:
    """Mean and standard deviation of all pixels, as fractions of 255."""
    import torch

    shares = images.flatten().bincount(minlength=256).to(torch.float64) / images.numel()
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = float(shares @ values)
    std = float(shares @ (values - mean) ** 2) ** 0.5
    if not std > 0:
        raise DataError(f"Normalising the images of {path}:", "all pixels are equal.", "give images that differ")
    return mean, std


def _digits() -> tuple[Batch, Batch]:
    import torch
    import torch.nn.functional as F

    packed = resources("cluster_ddp.mnist").joinpath("digits.csv.gz").read_bytes()
    cells = gzip.decompress(packed).replace(b"\n", b",").strip(b",").split(b",")
    table = torch.frombuffer(bytearray(map(int, cells)), dtype=torch.uint8).view(-1, 65)
    small = table[:, :-1].reshape(-1, 1, 8, 8).to(torch.float32) * (255 / 16)
    large = F.interpolate(small, size=(28, 28), mode="bilinear", align_corners=False)
    images, labels = large.squeeze(1).round().to(torch.uint8), table[:, -1].to(torch.int64)
    is_test = torch.arange(len(labels)) % DIGITS_TEST_EVERY == 0
    return (images[~is_test], labels[~is_test]), (images[is_test], labels[is_test])


def _normalised(train: Batch, test: Batch, statistics: tuple[float, float]) -> tuple[ResidentSet, ResidentSet]:
    from cluster_ddp import ResidentSet

    transform = functools.partial(normalise, mean=statistics[0], std=statistics[1])
    return ResidentSet(*train, transform=transform), ResidentSet(*test, transform=transform)


class IdxFile(NamedTuple):
    """An unpacked file of MNIST: its size in bytes, and its SHA-256. Mirrors compress it differently."""

    name: str
    size: int
    sha256: str


IDX_FILES = (
    IdxFile("train-images-idx3-ubyte", 47_040_016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
    IdxFile("train-labels-idx1-ubyte", 60_008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
    IdxFile("t10k-images-idx3-ubyte", 7_840_016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
    IdxFile("t10k-labels-idx1-ubyte", 10_008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
)

_DOWNLOADER = Path("scripts/download_data.py")
_CLASSES = {"mnist": "MNIST", "fashion": "FashionMNIST"}  # torchvision's


def raw_folder(data_dir: Path, dataset: str = "mnist") -> Path:
    """Where the unpacked files of "mnist", "fashion" (as torchvision's classes have them) or "folder:PATH" are."""
    if dataset.startswith(FOLDER):
        return Path(dataset.removeprefix(FOLDER)).expanduser()
    return data_dir / _CLASSES[dataset] / "raw"


def complaint(path: Path, idx_file: IdxFile, *, check_size: bool = True, check_content: bool = True) -> str | None:
    """What is wrong with a file, in words; None if it is the right one."""
    try:
        size = path.stat().st_size
        if check_size and size != idx_file.size:
            return f"{path.name} is damaged: {size:,} bytes instead of {idx_file.size:,}"
        if check_content and hashlib.sha256(path.read_bytes()).hexdigest() != idx_file.sha256:
            return f"{path.name} is damaged: its content has another SHA-256"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} can't be read: {error.strerror}"
    return None


def check(data_dir: Path, *, dataset: str = "mnist", check_content: bool = True) -> None:
    """Check that a dataset's files are in its folder: MNIST's SHA-256 (0.1 to 0.3 s, if `check_content`) and sizes.

    Of "fashion" only the sizes are checked, and a folder's files may have any.

    Raises:
        DataError: files are missing, damaged or can't be read. It names them, and how to get them.
    """
    folder = raw_folder(data_dir, dataset)
    known = {"check_size": dataset in _CLASSES, "check_content": check_content and dataset == "mnist"}
    complaints = (complaint(folder / one.name, one, **known) for one in IDX_FILES)
    if found := "; ".join(filter(None, complaints)):
        name = _CLASSES.get(dataset, "images")
        raise DataError(f"Reading {name} from {folder.absolute()}:", f"{found}.", _hint(data_dir, dataset))


def _hint(data_dir: Path, dataset: str) -> str:
    """How to get the files; by our script only where that is, in a checkout."""
    digits = "   (or train on the embedded digits: --dataset digits)"
    if dataset == "mnist" and _DOWNLOADER.is_file():
        fetch = f"python {_DOWNLOADER} --data-dir {shlex.quote(str(data_dir))}"
        return f"on a login node: {fetch}; without internet, from copies of its files: {fetch} --from FOLDER{digits}"
    if kind := _CLASSES.get(dataset):
        code = f"import torchvision; torchvision.datasets.{kind}({json.dumps(str(data_dir))}, download=True)"
        return f"on a login node: python -c {shlex.quote(code)}{digits}"
    return f"put four unpacked IDX files there: {', '.join(one.name for one in IDX_FILES)}"


def read_idx(path: Path, dimensions: int) -> tuple[tuple[int, ...], bytearray]:
    """Read an IDX file of bytes with so many dimensions. Returns the size of each, and the values.

    Raises:
        DataError: the file can't be read, or is not such a file.
    """
    asked, hint = f"Reading {path}:", "is it an IDX file of bytes, and unpacked?"
    try:
        content = bytearray(path.read_bytes())
    except OSError as error:
        raise DataError(asked, f"{error.strerror}.", hint) from error
    magic, begin = bytes((0, 0, 8, dimensions)), 4 + 4 * dimensions
    if content[:4] != magic or len(content) < begin:
        starts = f"it begins with {bytes(content[:4]).hex()}"
        raise DataError(asked, f"{starts}, and an IDX file of {dimensions} dimensions with {magic.hex()}.", hint)
    shape = tuple(int.from_bytes(content[at : at + 4], "big") for at in range(4, begin, 4))
    if (values := len(content) - begin) != math.prod(shape):
        by = " x ".join(map(str, shape))
        raise DataError(asked, f"its header says {by} values, and there are {values:,}.", "copy the file again")
    return shape, content[begin:]
