"""Images and labels as tensors: MNIST, Fashion-MNIST, files of the same kind, or the digits in the package.

The digits are the 1,797 of "Optical Recognition of Handwritten Digits" (Alpaydin, Kaynak 1998; UCI Machine
Learning Repository, doi:10.24432/C50P49, CC BY 4.0), 8x8 pixels of 0 to 16, here scaled to 28x28 pixels of 0 to 255.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from cluster_ddp import DataError, ResidentSet, Shard, World
from cluster_ddp.mnist import idx_files
from cluster_ddp.mnist.config import TrainConfig

CLASSES = 10

Batch = tuple[torch.Tensor, torch.Tensor]

# Mean and standard deviation of the training pixels, as fractions of white.
MNIST_STATISTICS = (0.1307, 0.3081)
DIGITS_STATISTICS = (0.3052, 0.3251)

DIGITS_TEST_EVERY = 5


@dataclass(frozen=True, slots=True)
class Normalise:
    """Normalises a batch of images. On the CPU the bits are those of torchvision's ToTensor and Normalize."""

    mean: float
    """Mean of the pixels, as a fraction of 255."""
    std: float
    """Their standard deviation, as a fraction of 255."""

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> Batch:
        """Images from uint8 (N, 28, 28) to float32 (N, 1, 28, 28); labels as they are."""
        return images.unsqueeze(1).to(torch.float32).div_(255).sub_(self.mean).div_(self.std), labels


def shards(config: TrainConfig, batch_size: int, world: World) -> tuple[Shard, Shard]:
    """This rank's batches of the training set, with `batch_size` samples, and of the test set."""
    # One rank of each node reads all bytes for the digests. All ranks check that the files are there, and their sizes.
    check_content = world.topology.local_rank == 0
    train_set, test_set = load(config.dataset, config.data_dir, check_content=check_content)
    share = config.resident_share
    loader: dict[str, Any] = {} if config.workers is None else {"num_workers": config.workers}
    return (
        world.shard(train_set, batch_size=batch_size, shuffle_seed=config.seed, resident_share=share, **loader),
        world.shard(test_set, batch_size=config.test_batch_size, resident_share=share),
    )


def load(name: str, data_dir: Path, *, check_content: bool = True) -> tuple[ResidentSet, ResidentSet]:
    """The training set and the test set: images, uint8 (N, 28, 28), and labels, int64 (N,).

    The images are normalised batch by batch (see `Normalise`).

    Args:
        name: "mnist" or "fashion": 60,000 and 10,000 images; "digits": 1,437 and 360; "folder:PATH": any number.
        data_dir: the root of torchvision's classes; not used for digits and a folder.
        check_content: compare the SHA-256 of MNIST's files, not only their sizes.

    Raises:
        DataError: files are missing, damaged or of another kind.
    """
    if name == "digits":
        return _digits()
    idx_files.check(data_dir, dataset=name, check_content=check_content)
    folder = idx_files.raw_folder(data_dir, name)
    images, labels, test_images, test_labels = (folder / one.name for one in idx_files.IDX_FILES)
    train, test = _read(images, labels), _read(test_images, test_labels)
    normalise = Normalise(*(MNIST_STATISTICS if name == "mnist" else _statistics(train[0], images)))
    return ResidentSet(*train, transform=normalise), ResidentSet(*test, transform=normalise)


def _read(images_file: Path, labels_file: Path) -> Batch:
    (count, *pixels), images = idx_files.read_idx(images_file, 3)
    (labels_count,), labels = idx_files.read_idx(labels_file, 1)
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
    shares = images.flatten().bincount(minlength=256).to(torch.float64) / images.numel()
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = (shares * values).sum()
    std = (shares * (values - mean) ** 2).sum().sqrt()
    if not std > 0:
        raise DataError(f"Normalising the images of {path}:", "all pixels are equal.", "give images that differ")
    return float(mean), float(std)


def _digits() -> tuple[ResidentSet, ResidentSet]:
    packed = resources("cluster_ddp.mnist").joinpath("digits.csv.gz").read_bytes()
    cells = gzip.decompress(packed).replace(b"\n", b",").strip(b",").split(b",")
    table = torch.frombuffer(bytearray(map(int, cells)), dtype=torch.uint8).view(-1, 65)
    small = table[:, :-1].reshape(-1, 1, 8, 8).to(torch.float32) * (255 / 16)
    large = F.interpolate(small, size=(28, 28), mode="bilinear", align_corners=False)
    images, labels = large.squeeze(1).round().to(torch.uint8), table[:, -1].to(torch.int64)
    is_test = torch.arange(len(labels)) % DIGITS_TEST_EVERY == 0
    normalise = Normalise(*DIGITS_STATISTICS)
    return (
        ResidentSet(images[~is_test], labels[~is_test], transform=normalise),
        ResidentSet(images[is_test], labels[is_test], transform=normalise),
    )
