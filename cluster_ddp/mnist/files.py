"""MNIST's four files: where torchvision's MNIST class looks for them, and what is in them. Standard library only."""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import dataclass
from pathlib import Path

from cluster_ddp.errors import DataError


@dataclass(frozen=True, slots=True)
class IdxFile:
    """One unpacked IDX file."""

    name: str
    size: int
    """Size in bytes."""
    sha256: str
    """SHA-256 of the unpacked content. Mirrors compress it differently."""


IDX_FILES = (
    IdxFile(
        "train-images-idx3-ubyte",
        47_040_016,
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    IdxFile(
        "train-labels-idx1-ubyte",
        60_008,
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    IdxFile(
        "t10k-images-idx3-ubyte",
        7_840_016,
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    IdxFile(
        "t10k-labels-idx1-ubyte",
        10_008,
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
)


def raw_folder(data_dir: Path) -> Path:
    """Where torchvision.datasets.MNIST(root=data_dir) has its unpacked files."""
    return data_dir / "MNIST" / "raw"


def complaint(path: Path, idx_file: IdxFile, *, check_content: bool = True) -> str | None:
    """What is wrong with a file, in words; None if it is the right one."""
    try:
        size = path.stat().st_size
        if size != idx_file.size:
            return f"{path.name} is damaged: {size:,} bytes instead of {idx_file.size:,}"
        if check_content and _sha256(path) != idx_file.sha256:
            return f"{path.name} is damaged: its content has another SHA-256"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} can't be read: {error.strerror}"
    return None


def check(data_dir: Path, *, check_content: bool = True) -> None:
    """Check that MNIST's files are in a folder.

    Args:
        data_dir: the root that torchvision's MNIST class takes.
        check_content: compare SHA-256 digests too (0.1 to 0.3 s), not only sizes.

    Raises:
        DataError: files are missing, damaged or can't be read. It names them, and the command for the login node.
    """
    folder = raw_folder(data_dir)
    complaints = (complaint(folder / f.name, f, check_content=check_content) for f in IDX_FILES)
    if found := "; ".join(filter(None, complaints)):
        raise DataError(
            f"Reading MNIST from {folder.absolute()}:",
            f"{found}.",
            f"on a login node: python scripts/download_data.py --data-dir {shlex.quote(str(data_dir))}   "
            "(or train on the embedded digits: --dataset digits)",
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
