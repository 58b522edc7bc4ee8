from __future__ import annotations

import ast
import functools
import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from idx_writer import idx

from cluster_ddp.errors import DataError
from cluster_ddp.mnist import data, training
from cluster_ddp.mnist.train_config import TrainConfig
from cluster_ddp.runtime.data.device_dataset import ResidentSet


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
    mean, std = data.MNIST_STATISTICS
    normalise = functools.partial(data.normalise, mean=mean, std=std)
    image_set = ResidentSet(images, torch.arange(len(images)), transform=normalise)
    transform = Compose([ToTensor(), Normalize((mean,), (std,))])
    chosen = [5, 0, 700]
    batch, labels = image_set.__getitems__(chosen)
    assert torch.equal(batch, torch.stack([transform(images[i].numpy()) for i in chosen]))
    assert labels.tolist() == chosen
    one, label = image_set[700]
    assert torch.equal(one, batch[2]) and label == 700


def write_small(raw: Path, *, counts: tuple[int, ...] = (50, 50, 30, 30), changed: Mapping[int, bytes] = {}) -> None:
    """Four files of few images; `changed` replaces the content of some, by number."""
    raw.mkdir(parents=True)
    for number, (idx_file, count) in enumerate(zip(data.IDX_FILES, counts)):
        pixels = "images" in idx_file.name
        sizes = [count, 28, 28] if pixels else [count]
        content = bytes(value % 251 % (256 if pixels else 10) for value in range(count * (784 if pixels else 1)))
        (raw / idx_file.name).write_bytes(changed.get(number, idx(sizes, content)))


@pytest.mark.parametrize(("name", "theirs"), [("mnist", "MNIST"), ("fashion", "FashionMNIST")])
def test_files_are_read_as_torchvision_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, theirs: str
) -> None:
    import torchvision

    write_small(tmp_path / theirs / "raw")
    monkeypatch.setattr(data, "check", lambda *_, **__: None)  # there is less in them
    for ours, train in zip(data.load(name, tmp_path), (True, False)):
        dataset = getattr(torchvision.datasets, theirs)(tmp_path, train=train)
        assert torch.equal(ours.tensors[0], dataset.data)
        assert torch.equal(ours.tensors[1], dataset.targets) and ours.tensors[1].dtype == dataset.targets.dtype


def test_images_in_a_folder_are_normalised_by_their_own_statistics(tmp_path: Path) -> None:
    write_small(tmp_path / "my images")
    train, test = data.load(f"folder:{tmp_path}/my images", Path("nowhere"))
    assert (len(train), len(test)) == (50, 30)
    images, _ = train.batch(torch.arange(50))
    assert images.mean().item() == pytest.approx(0, abs=1e-4)
    assert images.std(correction=0).item() == pytest.approx(1, abs=1e-4)
    assert test.transform is train.transform


def test_a_training_on_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_small(tmp_path / "images")
    training.run(TrainConfig(dataset="folder:images", recipe="fast", amp="off", epochs=1, cuda=False, log_interval=1))
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert run_dir.name.startswith("folder-") and (run_dir / "checkpoints" / "step-00000001.pt").exists()


@pytest.mark.parametrize(
    ("change", "mentioned"),
    [
        ({"changed": {0: b"\x1f\x8b\x08\x08" + bytes(40)}}, "it begins with 1f8b0808, and an IDX file of 3 dimensions"),
        ({"changed": {1: b""}}, "it begins with , and an IDX file of 1 dimensions with 00000801"),
        ({"changed": {2: bytes.fromhex("00000803 00000002 0000001c 0000001c") + bytes(1000)}}, "2 x 28 x 28 values"),
        (
            {"changed": {2: bytes.fromhex("00000803 00000001 00000008 00000008") + bytes(64)}},
            "1 images of 8 x 8 pixels",
        ),
        ({"changed": {3: bytes.fromhex("00000801 00000002 00")}}, "its header says 2 values, and there are 1."),
        ({"changed": {1: bytes.fromhex("00000801 00000032") + bytes([12] * 50)}}, "there is a label 12"),
        ({"changed": {0: bytes.fromhex("00000803 00000032 0000001c 0000001c") + bytes(39200)}}, "all pixels are equal"),
        ({"counts": (50, 49, 30, 30)}, "there are 50 images and 49 labels"),
        ({"counts": (50, 50, 0, 0)}, "there are 0 images"),
    ],
)
def test_files_of_another_kind_are_told(tmp_path: Path, change: dict[str, object], mentioned: str) -> None:
    write_small(tmp_path / "images", **change)
    with pytest.raises(DataError) as caught:
        data.load(f"folder:{tmp_path}/images", Path())
    assert mentioned in str(caught.value)


def test_missing_fashion_names_torchvisions_command(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        data.check(tmp_path / "it's", dataset="fashion")
    assert str(tmp_path / "it's" / "FashionMNIST" / "raw") in caught.value.asked
    python, option, code = shlex.split(caught.value.hint.partition(": ")[2].partition("   ")[0])
    assert (python, option) == ("python", "-c")
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    assert [ast.literal_eval(call.args[0]) for call in calls] == [str(tmp_path / "it's")]
    with pytest.raises(DataError, match="train-labels-idx1-ubyte is missing"):
        data.check(tmp_path, dataset=f"folder:{tmp_path}")


def write_fake_mnist(folder: Path) -> None:
    """Files of the right sizes and other content."""
    raw = data.raw_folder(folder)
    raw.mkdir(parents=True)
    for idx_file in data.IDX_FILES:
        with open(raw / idx_file.name, "wb") as file:
            file.truncate(idx_file.size)


ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("is_checkout", [True, False])
def test_missing_mnist_names_the_folder_and_the_command(
    tmp_path: Path, is_checkout: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel has no scripts/: there, the command is torchvision's."""
    monkeypatch.chdir(ROOT if is_checkout else tmp_path)
    with pytest.raises(DataError) as caught:
        data.load("mnist", tmp_path / "my data")
    assert str(tmp_path / "my data" / "MNIST" / "raw") in caught.value.asked
    assert "train-images-idx3-ubyte is missing" in caught.value.found
    if is_checkout:
        assert f"python scripts/download_data.py --data-dir '{tmp_path}/my data'" in caught.value.hint
    else:
        code = f'import torchvision; torchvision.datasets.MNIST("{tmp_path}/my data", download=True)'
        assert f"on a login node: python -c '{code}'" in caught.value.hint


def test_damage_is_named(tmp_path: Path) -> None:
    write_fake_mnist(tmp_path)
    with open(data.raw_folder(tmp_path) / "t10k-labels-idx1-ubyte", "ab") as file:
        file.write(b"x")
    with pytest.raises(DataError) as caught:
        data.check(tmp_path)
    assert "train-images-idx3-ubyte is damaged: its content has another SHA-256" in caught.value.found
    assert "t10k-labels-idx1-ubyte is damaged: 10,009 bytes instead of 10,008" in caught.value.found
    with pytest.raises(DataError) as caught:
        data.check(tmp_path, check_content=False)
    assert "SHA-256" not in caught.value.found


def test_an_unreadable_place_is_named(tmp_path: Path) -> None:
    raw = data.raw_folder(tmp_path)
    raw.parent.mkdir()
    raw.write_text("a file where a folder should be")
    with pytest.raises(DataError, match="can't be read: Not a directory"):
        data.check(tmp_path)
