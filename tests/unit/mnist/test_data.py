from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster_ddp.errors import DataError
from cluster_ddp.mnist import data, files


def test_the_embedded_digits() -> None:
    train, test = data.load("digits", Path("nowhere"))
    assert (len(train), len(test)) == (1437, 360)
    assert train.images.shape == (1437, 28, 28)
    assert train.images.dtype == torch.uint8
    assert train.labels.dtype == torch.int64
    counts = torch.cat([train.labels, test.labels]).bincount()
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # as UCI states for optdigits.tes
    pixels = train.images.to(torch.float64) / 255
    assert (round(pixels.mean().item(), 4), round(pixels.std().item(), 4)) == data.DIGITS_STATISTICS


def test_batches_are_the_bits_of_torchvisions_transform() -> None:
    from torchvision.transforms import Compose, Normalize, ToTensor

    images = torch.arange(256 * 3, dtype=torch.int64).remainder(256).to(torch.uint8).repeat(28 * 28).reshape(-1, 28, 28)
    image_set = data.ImageSet(images, torch.arange(len(images)), data.MNIST_STATISTICS)
    mean, std = data.MNIST_STATISTICS
    transform = Compose([ToTensor(), Normalize((mean,), (std,))])
    chosen = [5, 0, 700]
    batch, labels = image_set.__getitems__(chosen)
    assert torch.equal(batch, torch.stack([transform(images[i].numpy()) for i in chosen]))
    assert labels.tolist() == chosen
    one, label = image_set[700]
    assert torch.equal(one, batch[2]) and label == 700


def write_fake_mnist(folder: Path) -> None:
    """Files of the right sizes and other content."""
    raw = files.raw_folder(folder)
    raw.mkdir(parents=True)
    for idx_file in files.IDX_FILES:
        with open(raw / idx_file.name, "wb") as file:
            file.truncate(idx_file.size)


def test_missing_mnist_names_the_folder_and_the_command(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        data.load("mnist", tmp_path / "my data")
    assert str(tmp_path / "my data" / "MNIST" / "raw") in caught.value.asked
    assert "train-images-idx3-ubyte is missing" in caught.value.found
    assert f"python scripts/download_data.py --data-dir '{tmp_path}/my data'" in caught.value.hint


def test_damage_is_named(tmp_path: Path) -> None:
    write_fake_mnist(tmp_path)
    with open(files.raw_folder(tmp_path) / "t10k-labels-idx1-ubyte", "ab") as file:
        file.write(b"x")
    with pytest.raises(DataError) as caught:
        files.check(tmp_path)
    assert "train-images-idx3-ubyte is damaged: its content has another SHA-256" in caught.value.found
    assert "t10k-labels-idx1-ubyte is damaged: 10,009 bytes instead of 10,008" in caught.value.found
    with pytest.raises(DataError) as caught:
        files.check(tmp_path, check_content=False)
    assert "SHA-256" not in caught.value.found


def test_an_unreadable_place_is_named(tmp_path: Path) -> None:
    raw = files.raw_folder(tmp_path)
    raw.parent.mkdir()
    raw.write_text("a file where a folder should be")
    with pytest.raises(DataError, match="can't be read: Not a directory"):
        files.check(tmp_path)
