from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster_ddp.errors import DataError
from cluster_ddp.mnist import data, files
from cluster_ddp.runtime.data.resident import ResidentSet


def test_the_embedded_digits() -> None:
    train, test = data.load("digits", Path("nowhere"))
    assert (len(train), len(test)) == (1437, 360)
    images, labels = train.tensors
    assert images.shape == (1437, 28, 28)
    assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
    counts = torch.cat([labels, test.tensors[1]]).bincount()
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # as UCI states for optdigits.tes
    pixels = images.to(torch.float64) / 255
    assert (round(pixels.mean().item(), 4), round(pixels.std().item(), 4)) == data.DIGITS_STATISTICS


def test_batches_are_the_bits_of_torchvisions_transform() -> None:
    from torchvision.transforms import Compose, Normalize, ToTensor

    images = torch.arange(256 * 3, dtype=torch.int64).remainder(256).to(torch.uint8).repeat(28 * 28).reshape(-1, 28, 28)
    normalise = data.Normalise(*data.MNIST_STATISTICS)
    image_set = ResidentSet(images, torch.arange(len(images)), transform=normalise)
    mean, std = data.MNIST_STATISTICS
    transform = Compose([ToTensor(), Normalize((mean,), (std,))])
    chosen = [5, 0, 700]
    batch, labels = image_set.__getitems__(chosen)
    assert torch.equal(batch, torch.stack([transform(images[i].numpy()) for i in chosen]))
    assert labels.tolist() == chosen
    one, label = image_set[700]
    assert torch.equal(one, batch[2]) and label == 700


def test_mnist_is_read_as_torchvision_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import MNIST

    raw = files.raw_folder(tmp_path)
    raw.mkdir(parents=True)
    for idx_file, count in zip(files.IDX_FILES, (5, 5, 3, 3)):
        pixels = "images" in idx_file.name
        header = [2051, count, 28, 28] if pixels else [2049, count]
        content = bytes(value % 251 % (256 if pixels else 10) for value in range(count * (784 if pixels else 1)))
        (raw / idx_file.name).write_bytes(b"".join(value.to_bytes(4, "big") for value in header) + content)
    monkeypatch.setattr(files, "check", lambda *_, **__: None)  # there is less in them
    for ours, train in zip(data.load("mnist", tmp_path), (True, False)):
        theirs = MNIST(tmp_path, train=train)
        assert torch.equal(ours.tensors[0], theirs.data)
        assert torch.equal(ours.tensors[1], theirs.targets) and ours.tensors[1].dtype == theirs.targets.dtype


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
