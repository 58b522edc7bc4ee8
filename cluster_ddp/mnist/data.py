"""Images and labels as tensors: MNIST, Fashion-MNIST, files of the same kind, or the digits in the package.

The digits are the 1,797 of "Optical Recognition of Handwritten Digits" (Alpaydin, Kaynak 1998; UCI Machine
Learning Repository, doi:10.24432/C50P49, CC BY 4.0), 8x8 pixels of 0 to 16, here scaled to 28x28 pixels of 0 to 255.
"""

from __future__ import annotations

import functools
import gzip
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from cluster_ddp import DataError, ResidentSet, Shard, World
from cluster_ddp.mnist import idx_files
from cluster_ddp.train_options import TrainConfig

CLASSES = 10
# Mean and standard deviation of the training pixels, as fractions of white.
MNIST_STATISTICS = (0.1307, 0.3081)
DIGITS_STATISTICS = (0.3052, 0.3251)
DIGITS_TEST_EVERY = 5

Batch = tuple[torch.Tensor, torch.Tensor]


def normalise(images: torch.Tensor, labels: torch.Tensor, *, mean: float, std: float) -> Batch:
    """Images from uint8 (N, 28, 28) to float32 (N, 1, 28, 28); labels as they are. Mean and std are fractions of 255.

    On the CPU the bits are those of torchvision's ToTensor and Normalize.
    """
    return images.unsqueeze(1).to(torch.float32).div_(255).sub_(mean).div_(std), labels


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
    idx_files.check(data_dir, dataset=name, check_content=check_content)
    folder = idx_files.raw_folder(data_dir, name)
    images, labels, test_images, test_labels = (folder / one.name for one in idx_files.IDX_FILES)
    train, test = _read(images, labels), _read(test_images, test_labels)
    return _normalised(train, test, MNIST_STATISTICS if name == "mnist" else _statistics(train[0], images))


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
    mean = float(shares @ values)
    std = float(shares @ (values - mean) ** 2) ** 0.5
    if not std > 0:
        raise DataError(f"Normalising the images of {path}:", "all pixels are equal.", "give images that differ")
    return mean, std


def _digits() -> tuple[Batch, Batch]:
    packed = resources("cluster_ddp.mnist").joinpath("digits.csv.gz").read_bytes()
    cells = gzip.decompress(packed).replace(b"\n", b",").strip(b",").split(b",")
    table = torch.frombuffer(bytearray(map(int, cells)), dtype=torch.uint8).view(-1, 65)
    small = table[:, :-1].reshape(-1, 1, 8, 8).to(torch.float32) * (255 / 16)
    large = F.interpolate(small, size=(28, 28), mode="bilinear", align_corners=False)
    images, labels = large.squeeze(1).round().to(torch.uint8), table[:, -1].to(torch.int64)
    is_test = torch.arange(len(labels)) % DIGITS_TEST_EVERY == 0
    return (images[~is_test], labels[~is_test]), (images[is_test], labels[is_test])


def _normalised(train: Batch, test: Batch, statistics: tuple[float, float]) -> tuple[ResidentSet, ResidentSet]:
    transform = functools.partial(normalise, mean=statistics[0], std=statistics[1])
    return ResidentSet(*train, transform=transform), ResidentSet(*test, transform=transform)
