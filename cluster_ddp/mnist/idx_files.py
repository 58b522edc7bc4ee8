"""The four IDX files of a dataset: where torchvision looks for them, and what is in them. Standard library only.

The format: two zero bytes, the type (8: bytes), the number of dimensions, the dimensions in big-endian 32-bit numbers,
the values (yann.lecun.com/exdb/mnist).
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from pathlib import Path
from typing import NamedTuple

from cluster_ddp.errors import DataError


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

FOLDER = "folder:"
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
