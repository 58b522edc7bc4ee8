"""Images and labels as tensors: MNIST from torchvision's files, or the digits that are in the package.

The digits are the 1,797 of "Optical Recognition of Handwritten Digits" (Alpaydin, Kaynak 1998; UCI Machine
Learning Repository, doi:10.24432/C50P49, CC BY 4.0), 8x8 pixels of 0 to 16, here scaled to 28x28 pixels of 0 to 255.
"""

from __future__ import annotations

import csv
import gzip
from importlib.resources import files as resources
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from cluster_ddp.mnist import files
from cluster_ddp.mnist.config import DatasetName

Batch = tuple[torch.Tensor, torch.Tensor]

# Mean and standard deviation of the training pixels, as fractions of white.
MNIST_STATISTICS = (0.1307, 0.3081)
DIGITS_STATISTICS = (0.3052, 0.3251)
DIGITS_TEST_EVERY = 5


class ImageSet(Dataset[Batch]):
    """Grey images in memory, normalised batch by batch to the same bits as torchvision's ToTensor and Normalize.

    Args:
        images: uint8, shape (N, 28, 28).
        labels: int64, shape (N,).
        statistics: mean and standard deviation of the pixels as fractions of 255.
    """

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, statistics: tuple[float, float]) -> None:
        self.images, self.labels = images, labels
        self.mean, self.std = statistics

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: list[int]) -> Batch:
        """A whole batch at once, which DataLoader prefers: float32 (len, 1, 28, 28) and int64 (len,)."""
        chosen = torch.tensor(indices)
        images = self.images[chosen].unsqueeze(1).to(torch.float32).div_(255)
        return images.sub_(self.mean).div_(self.std), self.labels[chosen]


def as_batch(batch: Batch) -> Batch:
    """The collate_fn for an `ImageSet`, whose batches are whole already."""
    return batch


def load(name: DatasetName, data_dir: Path, *, check_content: bool = True) -> tuple[ImageSet, ImageSet]:
    """The training set and the test set.

    Args:
        name: "mnist": 60,000 and 10,000 images; "digits": 1,437 and 360.
        data_dir: the root of torchvision's MNIST class; not used for digits.
        check_content: compare MNIST's digests, not only its files' sizes.

    Raises:
        DataError: MNIST is missing or damaged.
    """
    if name == "digits":
        return _digits()
    files.check(data_dir, check_content=check_content)
    from torchvision.datasets import MNIST  # a second to import, which digits need not spend

    train, test = (MNIST(data_dir, train=train) for train in (True, False))
    return (
        ImageSet(train.data, train.targets, MNIST_STATISTICS),
        ImageSet(test.data, test.targets, MNIST_STATISTICS),
    )


def _digits() -> tuple[ImageSet, ImageSet]:
    packed = resources("cluster_ddp.mnist").joinpath("digits.csv.gz").read_bytes()
    rows = csv.reader(gzip.decompress(packed).decode("ascii").splitlines())
    table = torch.tensor([[int(cell) for cell in row] for row in rows])
    small = table[:, :-1].reshape(-1, 1, 8, 8).to(torch.float32) * (255 / 16)
    large = F.interpolate(small, size=(28, 28), mode="bilinear", align_corners=False)
    images, labels = large.squeeze(1).round().to(torch.uint8), table[:, -1]
    is_test = torch.arange(len(labels)) % DIGITS_TEST_EVERY == 0
    return (
        ImageSet(images[~is_test], labels[~is_test], DIGITS_STATISTICS),
        ImageSet(images[is_test], labels[is_test], DIGITS_STATISTICS),
    )
