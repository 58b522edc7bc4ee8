"""examples/detection.py: options, data, mAP and modes; and it resumes as if it had not been stopped."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from detection_parts.generated import GeneratedBoxes
from detection_parts.options import OPTIONS, read
from PIL import Image
from ranks import job_ids, run_ranks, slurm_step
from test_examples import EXAMPLES, run

import cluster_ddp

pytestmark = pytest.mark.full

JOB_ID = job_ids()
NAME = "detection.py"
SMALL = ("--samples", "8", "--batch-size", "2", "--epochs", "2", "--report-every", "1", "--evaluate-at", "0", "1")
# COCO's 80 categories have the numbers 1 to 90 with gaps.
CATEGORIES = [number for number in range(1, 91) if number not in (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)]


def part(name: str) -> ModuleType:
    """A module of the example. Importing torchvision takes seconds: not where tests are collected, in each process."""
    return importlib.import_module(f"detection_parts.{name}")


def test_the_command_line_is_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('backbone = "resnet50"\nlr = 1e-3\nevaluate_at = []\nepochs = 3\n')
    options = read(["--config", str(tmp_path / "own.toml"), "--epochs", "5", "--decay-at", "1", "2"])
    assert (options.backbone, options.lr, options.evaluate_at) == ("resnet50", 1e-3, [])
    assert (options.epochs, options.decay_at, options.momentum) == (5, [1, 2], 0.9)
    assert read([]).epochs == OPTIONS["epochs"][0]


def test_the_options_for_coco_are_legal() -> None:
    options = read(["--config", str(EXAMPLES / "detection.toml")])
    assert (options.epochs, options.lr, options.batch_size, options.workers) == (65, 2.6e-3, 64, 8)
    assert (options.decay_at, options.evaluate_at) == ([43, 54], [21, 31, 37, 42, 48, 53, 59, 64])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("batchsize = 8", ["there is no option 'batchsize'.", "Did you mean batch_size?", "backbone", "weight_decay"]),
        ("batch_size = 2.5", ["argument --batch-size", "invalid int value: '2.5'"]),
        ("amp = true", ["argument --amp", "invalid choice: 'True'", "bfloat16"]),
        ('backbone = "resnet19"', ["argument --backbone", "resnet18"]),
        ("lr = ", ["own.toml: Invalid value"]),
        (None, ["own.toml", "No such file"]),
        ('mode = "evaluation"', ["--mode evaluation needs --weights"]),
        ('backbone = "vgg16"\nbackbone_weights = "x.pth"', ["--backbone-weights are those of a ResNet"]),
    ],
)
def test_a_wrong_option_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, words: list[str]
) -> None:
    if content is not None:
        (tmp_path / "own.toml").write_text(content)
    with pytest.raises(SystemExit) as end:
        read(["--config", str(tmp_path / "own.toml")])
    told = capsys.readouterr().err
    assert end.value.code == 2
    assert [word for word in words if word not in told] == []


def test_without_pycocotools_the_error_has_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    with pytest.raises(cluster_ddp.SpecError, match=r"(?s)not installed.*Hint: pip install pycocotools$"):
        part("coco").need_pycocotools()


@pytest.mark.parametrize(("backbone", "channels"), [("resnet18", 256), ("resnet34", 256), ("resnet152", 1024)])
def test_the_backbone_has_ssds_six_maps(backbone: str, channels: int) -> None:
    with torch.device("meta"):
        maps = part("model").ssd300(backbone, 3).backbone(torch.zeros(1, 3, 300, 300))
    assert [one.shape[-1] for one in maps.values()] == [38, 19, 10, 5, 3, 1]
    assert [one.shape[1] for one in maps.values()] == [channels, 512, 512, 256, 256, 256]


@pytest.mark.parametrize("backbone", ["resnet18", "vgg16"])
def test_it_finds_boxes_and_has_a_loss(backbone: str) -> None:
    model = part("model").ssd300(backbone, 3)
    image, target = GeneratedBoxes(1)[0]
    with torch.no_grad():
        losses = model((image,), (target,))
        (found,) = model.eval()([torch.rand(3, 200, 100)])
    assert all(loss.isfinite() for loss in losses.values())
    assert losses.keys() == {"bbox_regression", "classification"}
    assert found["boxes"].shape == (len(found["scores"]), 4)


def test_the_weights_of_the_backbone_may_come_from_a_file(tmp_path: Path) -> None:
    from torchvision.models import resnet18

    net = resnet18()
    torch.save(net.state_dict(), tmp_path / "resnet18.pth")
    model = part("model").ssd300("resnet18", 3, str(tmp_path / "resnet18.pth"))
    assert torch.equal(model.backbone.trunk[0].weight, net.conv1.weight)


def test_learning_rates_of_weights_and_biases() -> None:
    options = argparse.Namespace(momentum=0.9, weight_decay=5e-4, warmup_steps=4, decay_at=[2, 3])
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
    optimizer = part("model").new_optimizer(options, model, lr=1.0)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [5e-4, 0]
    scheduler, rates = part("model").new_scheduler(options, optimizer, updates=5), []
    for _ in range(20):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    assert all(bias == pytest.approx(2 * weight) for weight, bias in rates)
    weights = [weight for weight, _ in rates]
    assert weights[0] == pytest.approx(0.01)
    assert weights[:4] == sorted(weights[:4])
    assert weights[4:] == pytest.approx([1] * 6 + [0.1] * 5 + [0.01] * 5)


def test_generated_boxes_are_where_the_colours_are() -> None:
    data = GeneratedBoxes(6, first=10)
    for index in range(6):
        image, target = data[index]
        assert torch.equal(image, data[index][0])
        assert len(target["boxes"]) == len(target["labels"]) == 1 + index % 3
        for (x1, y1, x2, y2), label in zip(target["boxes"].int().tolist(), target["labels"].tolist()):
            assert image[label - 1, y1:y2, x1:x2].min() >= 0.6 > image[label - 1, y1:y2, x2].max()
    assert not torch.equal(GeneratedBoxes(1)[0][0], data[0][0])


class Oracle(torch.nn.Module):
    """Finds the boxes of generated images, but for those of image 2, and moved by the rank's own buffer."""

    def __init__(self, data: GeneratedBoxes, offset: float) -> None:
        super().__init__()
        self.register_buffer("offset", torch.tensor(offset))
        self.known = {float(image.sum()): target for image, target in (data[index] for index in range(len(data)))}

    def forward(self, images: tuple[torch.Tensor, ...]) -> list[dict[str, torch.Tensor]]:
        targets = [self.known[float(image.sum())] for image in images]
        counts = [0 if target["image_id"] == 2 else len(target["boxes"]) for target in targets]
        return [
            {
                "boxes": target["boxes"][:count] + self.offset,
                "labels": target["labels"][:count],
                "scores": 0.5 + 0.1 * torch.arange(count),
            }
            for target, count in zip(targets, counts)
        ]


def print_maps() -> None:
    """In a rank: the mAP of the oracle, for a single image and for several."""
    with cluster_ddp.distributed() as world:
        for size in (1, 5):
            data = GeneratedBoxes(size)
            shard = world.shard(data, batch_size=2, collate_fn=part("training").collate)
            model, options = Oracle(data, offset=100.0 * world.rank), argparse.Namespace(amp="off")
            print(f"mAP {part('mean_average_precision').evaluate(options, world, model, data, shard)}", flush=True)


def test_the_map_does_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    """Of an image on one rank only, too; and BatchNorm's statistics are those of rank 0."""
    values = []
    for ranks in (1, 2):
        (tmp_path / str(ranks)).mkdir()
        environments = [slurm_step(rank, ranks, job_id=JOB_ID + ranks) for rank in range(ranks)]
        ends = run_ranks(print_maps, environments, tmp_path / str(ranks))
        assert [end.exit_code for end in ends] == [0] * ranks, ends
        values += [[float(one) for one in re.findall(r"^mAP (\S+)", end.output, re.MULTILINE)] for end in ends]
    assert values[0] == values[1] == values[2]
    assert values[0][0] == pytest.approx(1)
    assert 0.2 < values[0][1] < 0.9


def write_coco(folder: Path) -> None:
    """8 images in each part: six with a box, one with a crowd's and one without an area, one without any."""
    (folder / "annotations").mkdir(parents=True)
    for part in ("train2017", "val2017"):
        (folder / part).mkdir()
        images, boxes = [], []
        for number in range(8):
            name, width = f"{number:012}.jpg", 60 + number
            Image.new("RGB", (width, 50), (30 * number, 100, 200)).save(folder / part / name)
            images.append({"id": 100 + number, "file_name": name, "width": width, "height": 50})
            is_real = number < 6
            for size in [(30, 20)] if is_real else [(30, 20), (0, 20)] if number == 6 else []:
                box = {"bbox": [5, 10, *size], "area": size[0] * size[1], "iscrowd": int(number == 6 and size[0] > 0)}
                category = CATEGORIES[number - 6]
                boxes.append({"id": len(boxes) + 1, "image_id": 100 + number, "category_id": category, **box})
                boxes[-1]["segmentation"] = [[5, 10, 35, 10, 35, 30]]
        content = {"images": images, "annotations": boxes, "categories": [{"id": one} for one in CATEGORIES]}
        (folder / "annotations" / f"instances_{part}.json").write_text(json.dumps(content))


def test_cocos_images_and_boxes(tmp_path: Path) -> None:
    write_coco(tmp_path)
    tests, trains = (
        part("coco").CocoBoxes(str(tmp_path), train=False),
        part("coco").CocoBoxes(str(tmp_path), train=True),
    )
    assert (len(tests), len(trains), len(tests.categories)) == (8, 6, 80)
    image, target = tests[1]
    assert (image.shape, image.dtype, type(target["boxes"])) == ((3, 50, 61), torch.float32, torch.Tensor)
    assert target["boxes"].tolist() == [[5, 10, 35, 30]]
    assert (target["labels"].tolist(), target["image_id"]) == ([76], 101)
    assert [len(tests[index][1]["boxes"]) for index in (5, 6, 7)] == [1, 0, 0]
    for image, target in (trains[index] for index in range(6)):
        assert image.shape == (3, 300, 300)
        assert 0 <= image.min() <= image.max() <= 1
        assert len(target["boxes"]) == len(target["labels"])


def test_a_folder_without_coco_is_named(tmp_path: Path) -> None:
    with pytest.raises(cluster_ddp.DataError, match=r"there is no .*instances_val2017\.json"):
        part("coco").CocoBoxes(str(tmp_path), train=False)


def test_coco_is_trained_on_with_workers(tmp_path: Path) -> None:
    write_coco(tmp_path / "coco")
    more = ("--data", str(tmp_path / "coco"), "--epochs", "1", "--evaluate-at", "0", "--workers", "1")
    (end,) = run(tmp_path, "--batch-size", "3", "--report-every", "1", *more, name=NAME, ranks=1)
    assert end.exit_code == 0, end
    assert re.findall(r"^epoch 0, step (\S+): loss \d", end.output, re.MULTILINE) == ["1/2", "2/2"]
    assert "epoch 0: mAP 0." in end.output


def printed(output: str) -> list[str]:
    return re.findall(r"^epoch .*(?:loss|mAP) .*", output, re.MULTILINE)


def logged(run_dir: Path) -> list[dict[str, object]]:
    """The records of training and evaluations, without what depends on the time."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    timeless = [{name: record[name] for name in record.keys() - {"time", "samples_per_s"}} for record in records]
    return [record for record in timeless if record["kind"] in ("train", "test")]


def test_a_stopped_training_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    ranks = 2
    one_epoch = ("--epochs", "1", "--evaluate-at", "0")  # of two steps on each rank
    arguments = (*SMALL, *one_epoch, "--batch-size", "1", "--accumulate", "2", "--warmup-steps", "2")
    whole = run(tmp_path / "whole", *arguments, name=NAME, ranks=ranks)
    assert [end.exit_code for end in whole] == [0] * ranks, whole
    begun = run(tmp_path / "stopped", *arguments, name=NAME, ranks=ranks, stop_at=1)
    assert [end.exit_code for end in begun] == [75] * ranks, begun
    (tmp_path / "stopped" / "rank0.log").rename(tmp_path / "before")
    ended = run(tmp_path / "stopped", *arguments, name=NAME, ranks=ranks, restarts=1)
    assert [end.exit_code for end in ended] == [0] * ranks, ended
    assert printed(begun[0].output) + printed(ended[0].output) == printed(whole[0].output) != []
    assert logged(tmp_path / "stopped" / "run") == logged(tmp_path / "whole" / "run")
    models = [part("model").ssd300("resnet18", 3) for _ in range(2)]
    for name, model in zip(("whole", "stopped"), models):
        cluster_ddp.load_weights(tmp_path / name / "run", model)
    first, second = (model.state_dict() for model in models)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_all_modes_on_two_ranks(tmp_path: Path) -> None:
    small = (*SMALL, "--samples", "4", "--batch-size", "1")
    ends = run(tmp_path / "train", *small, "--lr", "0.1", name=NAME, ranks=2)
    assert [end.exit_code for end in ends] == [0, 0], ends
    assert "Real global batch: 2 ranks x batch 1 x accumulation 1 = 2 images; learning rate 0.00625" in ends[0].output
    records = logged(tmp_path / "train" / "run")
    maps = [record["mAP"] for record in records if record["kind"] == "test"]
    assert [record["step"] for record in records if record["kind"] == "train"] == list(range(1, 5))
    best = tmp_path / "train" / "run" / "checkpoints" / "best-mAP.pt"
    for ranks in (1, 2):
        options = ("--mode", "evaluation", "--weights", str(best))
        ends = run(tmp_path / f"evaluation-{ranks}", *small, *options, name=NAME, ranks=ranks)
        assert [end.exit_code for end in ends] == [0] * ranks, ends
        assert f"best-mAP.pt: mAP {max(maps):.4f}" in ends[0].output
    for mode in ("benchmark-training", "benchmark-inference"):
        options = ("--mode", mode, "--benchmark-steps", "2", "--amp", "bfloat16")
        ends = run(tmp_path / mode, *small, *options, name=NAME, ranks=2)
        assert [end.exit_code for end in ends] == [0, 0], ends
        assert re.search(rf"^{mode}: \d+\.\d images/s \(2 x cpu, resnet18, batch 1", ends[0].output, re.MULTILINE)
        assert not (tmp_path / mode / "run").exists()


def test_its_parts_are_short() -> None:
    for path in (EXAMPLES / "detection_parts").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 120, path
