"""Images and labels as tensors: MNIST, or the digits in the package.

The digits are the 1,797 of "Optical Recognition of Handwritten Digits" (Alpaydin, Kaynak 1998; UCI Machine
Learning Repository, doi:10.24432/C50P49, CC BY 4.0), 8x8 pixels of 0 to 16, here scaled to 28x28 pixels of 0 to 255.
"""

from __future__ import annotations

import gzip
from importlib.resources import files as resources
from pathlib import Path

import torch
import torch.nn.functional as F

from cluster_ddp import ResidentSet
from cluster_ddp.mnist import files
from cluster_ddp.mnist.config import DatasetName

Batch = tuple[torch.Tensor, torch.Tensor]

# Mean and standard deviation of the training pixels, as fractions of white.
MNIST_STATISTICS = (0.1307, 0.3081)
DIGITS_STATISTICS = (0.3052, 0.3251)

DIGITS_TEST_EVERY = 5


class Normalise:
    """Normalises a batch of images. On the CPU the bits are those of torchvision's ToTensor and Normalize.

    Args:
        mean: mean of the pixels, as a fraction of 255.
        std: their standard deviation, as a fraction of 255.
    """

    def __init__(self, mean: float, std: float) -> None:
        self.mean, self.std = mean, std

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> Batch:
        """Images from uint8 (N, 28, 28) to float32 (N, 1, 28, 28); labels as they are."""
        return images.unsqueeze(1).to(torch.float32).div_(255).sub_(self.mean).div_(self.std), labels


def load(name: DatasetName, data_dir: Path, *, check_content: bool = True) -> tuple[ResidentSet, ResidentSet]:
    """The training set and the test set: images, uint8 (N, 28, 28), and labels, int64 (N,).

    The images are normalised batch by batch (see `Normalise`).

    Args:
        name: "mnist": 60,000 and 10,000 images; "digits": 1,437 and 360.
        data_dir: the root of torchvision's MNIST class; not used for digits.
        check_content: compare the SHA-256 of MNIST's files, not only their sizes.

    Raises:
        DataError: MNIST is missing or damaged.
    """
    if name == "digits":
        return _digits()
    files.check(data_dir, check_content=check_content)
    images, labels, test_images, test_labels = (files.raw_folder(data_dir) / one.name for one in files.IDX_FILES)
    normalise = Normalise(*MNIST_STATISTICS)
    return (
        ResidentSet(_pixels(images), _labels(labels), transform=normalise),
        ResidentSet(_pixels(test_images), _labels(test_labels), transform=normalise),
    )


def _pixels(path: Path) -> torch.Tensor:
    return _content(path, header_bytes=16).view(-1, 28, 28)


def _labels(path: Path) -> torch.Tensor:
    return _content(path, header_bytes=8).to(torch.int64)


def _content(path: Path, *, header_bytes: int) -> torch.Tensor:
    """The bytes of an IDX file (http://yann.lecun.com/exdb/mnist) after its header."""
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8, offset=header_bytes)


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
