"""examples/detection.py: options, data, mAP and modes; and it resumes as if it had not been stopped.

pycocotools is here to compare with: the ranks can't import it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from detection_parts import read_options as read
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from ranks import Outcome, job_ids, run_ranks, slurm_step
from slowness import LIMIT_S, scaled
from test_examples import EXAMPLES, run, run_example

import cluster_ddp

pytestmark = pytest.mark.full

JOB_ID = job_ids()
NAME = "detection.py"
SMALL = ("--samples", "8", "--batch-size", "2", "--epochs", "2", "--report-every", "1", "--evaluate-after", "1", "2")
# COCO's 80 categories have the numbers 1 to 90 with gaps.
CATEGORIES = [number for number in range(1, 91) if number not in (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)]


def part(name: str) -> ModuleType:
    """A module of the example. Importing torchvision takes seconds: not where tests are collected, in each process."""
    return importlib.import_module(f"detection_parts.{name}")


def test_the_command_line_is_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('backbone = "resnet50"\nlr = 1e-3\nevaluate_after = []\nepochs = 3\n')
    options = read(["--config", str(tmp_path / "own.toml"), "--epochs", "5", "--decay-after", "1", "2"])
    assert (options.backbone, options.lr, options.evaluate_after) == ("resnet50", 1e-3, [])
    assert (options.epochs, options.decay_after, options.momentum) == (5, [1, 2], 0.9)
    assert (read([]).epochs, read([]).backbone, read([]).evaluate_after) == (4, "resnet18", [2, 4])


def test_the_options_for_coco_are_legal() -> None:
    options = read(["--config", str(EXAMPLES / "detection.toml")])
    assert (options.epochs, options.lr, options.batch_size, options.workers) == (65, 2.6e-3, 64, 8)
    assert (options.decay_after, options.evaluate_after) == ([43, 54], [22, 32, 38, 43, 49, 54, 60, 65])


def test_the_help_explains_each_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "--epochs EPOCHS number of epochs (default: 4)" in told
    assert "--benchmark-steps BENCHMARK_STEPS steps of a benchmark, at most an epoch (default: 20)" in told


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("batchsize = 8", ["unrecognized arguments: --batchsize 8", "--batch-size", "--backbone", "--weight-decay"]),
        ("batch_size = 2.5", ["argument --batch-size", "invalid int value: '2.5'"]),
        ("amp = true", ["argument --amp", "invalid choice: 'True'", "bfloat16"]),
        ('backbone = "resnet19"', ["argument --backbone", "resnet18"]),
        ("lr = ", ["own.toml: Invalid value"]),
        (None, ["own.toml", "No such file"]),
        ('mode = "evaluation"', ["--mode evaluation needs --weights"]),
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


def ssd300(*arguments: str) -> torch.nn.Module:
    """For the three classes of generated images, on a CPU."""
    world = argparse.Namespace(device=torch.device("cpu"))
    model: torch.nn.Module = part("model").ssd300(read([*arguments]), world, 3)
    return model


@pytest.mark.parametrize(("backbone", "channels"), [("resnet18", 256), ("resnet34", 256), ("resnet152", 1024)])
def test_the_backbone_has_ssds_six_maps(backbone: str, channels: int) -> None:
    with torch.device("meta"):
        maps = part("model").ResNetMaps(backbone, "")(torch.zeros(1, 3, 300, 300))
    assert [one.shape[-1] for one in maps.values()] == [38, 19, 10, 5, 3, 1]
    assert [one.shape[1] for one in maps.values()] == [channels, 512, 512, 256, 256, 256]


def test_it_finds_boxes_and_has_a_loss() -> None:
    model = ssd300()
    image, target = part("data").GeneratedImages()[0]
    with torch.no_grad():
        losses = model((image,), (target,))
        (found,) = model.eval()([torch.rand(3, 200, 100)])
    assert all(loss.isfinite() for loss in losses.values())
    assert losses.keys() == {"bbox_regression", "classification"}
    assert found["boxes"].shape == (len(found["scores"]), 4)


def test_the_weights_of_the_backbone_come_from_a_file_that_a_documented_command_writes(tmp_path: Path) -> None:
    """The command finds a stand-in for torchvision's file, as if it had been downloaded before."""
    from torchvision.models import ResNet50_Weights, resnet50

    page = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    (command,) = re.findall(r"^ +python -c (.*weights=.*)", page, re.MULTILINE)
    net, cache = resnet50(), tmp_path / "hub" / "checkpoints"
    cache.mkdir(parents=True)
    torch.save(net.state_dict(), cache / Path(ResNet50_Weights.DEFAULT.url).name)
    env = {**os.environ, "TORCH_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", *shlex.split(command)], cwd=tmp_path, env=env, timeout=scaled(LIMIT_S))
    assert done.returncode == 0
    model = ssd300("--backbone", "resnet50", "--backbone-weights", str(tmp_path / "resnet50.pth"))
    assert torch.equal(model.backbone[0][0].weight, net.conv1.weight)


def test_a_missing_file_of_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(cluster_ddp.DataError, match=r"(?s)Weights of resnet18:.*there is no .*x\.pth.*examples\.md"):
        ssd300("--backbone-weights", str(tmp_path / "x.pth"))


def test_generated_boxes_are_where_the_colours_are() -> None:
    data = part("data").GeneratedImages()
    for seed in range(-3, 3):
        image, target = data[seed]
        assert torch.equal(image, data[seed][0])
        assert len(target["boxes"]) == len(target["labels"]) == 1 + seed % 3
        for (x1, y1, x2, y2), label in zip(target["boxes"].int().tolist(), target["labels"].tolist()):
            assert image[label - 1, y1:y2, x1:x2].min() >= 0.6 > image[label - 1, y1:y2, x2].max()
    assert not torch.equal(data[0][0], data[1][0])


def made_up_boxes(
    random: torch.Generator, count: int, found_count: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """True boxes of three classes, some of them crowds; and found ones around them, or around one that is not true."""
    starts, is_crowd = 200 * torch.rand(count + 1, 2, generator=random), torch.rand(count, generator=random) < 0.3
    is_crowd[:1] = False
    boxes = torch.hstack([starts, starts + 8 + 90 * torch.rand(count + 1, 2, generator=random)])
    labels = torch.randint(1, 4, (count + 1,), generator=random)
    near = torch.randint(0, count + 1, (found_count,), generator=random)
    moved = boxes[near] + 6 * torch.rand(found_count, 1, generator=random) * torch.rand(
        found_count, 4, generator=random
    )
    found = {
        "boxes": moved,
        "labels": labels[near],
        "scores": torch.rand(found_count, generator=random).round(decimals=2),
    }
    return {"boxes": boxes[:-1], "labels": labels[:-1], "is_crowd": is_crowd}, found


def pycocotools_map(images: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]) -> float:
    """The mAP of true and found boxes."""
    truth, rows = [], []
    for number, (true, found) in enumerate(images):
        for (x1, y1, x2, y2), label, is_crowd in zip(
            *(true[name].tolist() for name in ("boxes", "labels", "is_crowd"))
        ):
            size = {"bbox": [x1, y1, x2 - x1, y2 - y1], "area": (x2 - x1) * (y2 - y1), "iscrowd": int(is_crowd)}
            truth.append({"id": len(truth) + 1, "image_id": number, "category_id": label, **size})
        ids = torch.full_like(found["scores"], number)
        starts, ends = found["boxes"].double().split(2, dim=1)
        rows.append(torch.column_stack([ids, starts, ends - starts, found["scores"], found["labels"]]))
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        ids = [{"id": number} for number in range(max(4, len(images)))]
        coco.dataset = {"images": ids[: len(images)], "categories": ids[1:4], "annotations": truth}
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(torch.cat(rows).numpy()), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[0])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("images", "found"), [(20, 15), (3, 400), (1, 1), (4, 0)])
def test_the_map_is_that_of_pycocotools(seed: int, images: int, found: int) -> None:
    """With crowds, equal scores, an image without true boxes, and images without found ones."""
    random = torch.Generator().manual_seed(seed)
    made_up = [made_up_boxes(random, 5 - number % 6, found) for number in range(images)]
    data = part("data")
    mean_ap = data.mean_average_precision([data.match(*one) for one in made_up])
    assert mean_ap == (pytest.approx(pycocotools_map(made_up), abs=1e-9) if found else 0)


@pytest.mark.parametrize(("found", "mean_ap"), [(100, 0.01), (101, 0)])
def test_the_best_100_boxes_of_a_class_count(found: int, mean_ap: float) -> None:
    """The last box is the true one."""
    true = {"boxes": torch.tensor([[0.0, 0, 9, 9]]), "labels": torch.tensor([1]), "is_crowd": torch.tensor([False])}
    boxes = torch.tensor([[50.0, 50, 59, 59]] * (found - 1) + [[0, 0, 9, 9]])
    labels, scores = torch.ones(found, dtype=torch.int64), torch.linspace(1, 0.1, found)
    images = [(true, {"boxes": boxes, "labels": labels, "scores": scores})]
    data = part("data")
    assert data.mean_average_precision([data.match(*one) for one in images]) == pytest.approx(mean_ap)
    assert pycocotools_map(images) == pytest.approx(mean_ap)


class Oracle(torch.nn.Module):
    """Finds the boxes of generated images, but for those of image -2, and moved by the rank's own buffer."""

    def __init__(self, size: int, offset: float) -> None:
        super().__init__()
        self.register_buffer("offset", torch.tensor(offset))
        data = part("data").GeneratedImages()
        self.known = {float(image.sum()): target for image, target in (data[seed] for seed in range(-size, 0))}

    def forward(self, images: tuple[torch.Tensor, ...]) -> list[dict[str, torch.Tensor]]:
        targets = [self.known[float(image.sum())] for image in images]
        counts = [0 if target["image_id"] == -2 else len(target["boxes"]) for target in targets]
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
    sys.modules["pycocotools"] = None  # type: ignore[assignment]
    with cluster_ddp.distributed() as world:
        for size in (1, 5):
            options = read(["--samples", str(4 * size), "--batch-size", "2"])
            shard, _ = part("data").load(options, world, train=False)
            model = Oracle(size, offset=100.0 * world.rank)
            print(f"mAP {part('data').evaluate(world, model, shard)}", flush=True)


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
    tests, trains = (part("data").CocoImages(str(tmp_path), train=train) for train in (False, True))
    assert (len(tests.ids), len(trains.ids), tests.classes) == (8, 6, 90)
    image, target = tests[101]
    assert (image.shape, image.dtype, type(target["boxes"])) == ((3, 50, 61), torch.float32, torch.Tensor)
    assert target["boxes"].tolist() == [[5, 10, 35, 30]]
    assert (target["labels"].tolist(), target["image_id"]) == ([CATEGORIES[-5]], 101)
    assert [tests[number][1]["is_crowd"].tolist() for number in (105, 106, 107)] == [[False], [True, False], []]
    for image, target in (trains[number] for number in trains.ids):
        assert image.shape == (3, 300, 300)
        assert 0 <= image.min() <= image.max() <= 1
        assert len(target["boxes"]) == len(target["labels"])


def test_a_folder_without_coco_is_named(tmp_path: Path) -> None:
    with pytest.raises(cluster_ddp.DataError, match=r"there is no .*instances_val2017\.json"):
        part("data").CocoImages(str(tmp_path), train=False)


def run_plainly(arguments: tuple[str, ...]) -> None:
    """In a rank: with the package's own dependencies only."""
    sys.modules["pycocotools"] = None  # type: ignore[assignment]
    run_example(EXAMPLES / NAME, arguments, None)


def trained_plainly(folder: Path, *arguments: str) -> Outcome:
    env = slurm_step(0, 1, job_id=JOB_ID + 1, CLUSTER_DDP_RUN_DIR=str(folder / "run"))
    more = ("--epochs", "1", "--evaluate-after", "1", "--report-every", "1")
    (end,) = run_ranks(functools.partial(run_plainly, (*arguments, *more)), [env], folder)
    return end


def test_coco_is_trained_on_with_workers_in_a_plain_install(tmp_path: Path) -> None:
    write_coco(tmp_path / "coco")
    end = trained_plainly(tmp_path, "--data", str(tmp_path / "coco"), "--batch-size", "3", "--workers", "1")
    assert end.exit_code == 0, end
    assert re.findall(r"^epoch 1, step (\S+): loss \d", end.output, re.MULTILINE) == ["1/2", "2/2"]
    assert "epoch 1: mAP 0." in end.output


def printed(output: str) -> list[str]:
    return re.findall(r"^epoch .*(?:loss|mAP) .*", output, re.MULTILINE)


def logged(run_dir: Path) -> list[dict[str, object]]:
    """The records of training and evaluations, without what depends on the time."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    timeless = [{name: record[name] for name in record.keys() - {"time", "samples_per_s"}} for record in records]
    return [record for record in timeless if record["kind"] in ("train", "test")]


def test_a_stopped_training_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    ranks = 2
    one_epoch = ("--epochs", "1", "--evaluate-after", "1")  # of four steps on each rank
    arguments = (*SMALL, *one_epoch, "--batch-size", "1", "--warmup-steps", "2")
    whole = run(tmp_path / "whole", *arguments, name=NAME, ranks=ranks)
    assert [end.exit_code for end in whole] == [0] * ranks, whole
    begun = run(tmp_path / "stopped", *arguments, name=NAME, ranks=ranks, stop_at=1)
    assert [end.exit_code for end in begun] == [75] * ranks, begun
    (tmp_path / "stopped" / "rank0.log").rename(tmp_path / "before")
    ended = run(tmp_path / "stopped", *arguments, name=NAME, ranks=ranks, restarts=1)
    assert [end.exit_code for end in ended] == [0] * ranks, ended
    assert printed(begun[0].output) + printed(ended[0].output) == printed(whole[0].output) != []
    assert logged(tmp_path / "stopped" / "run") == logged(tmp_path / "whole" / "run")
    models = [ssd300() for _ in range(2)]
    for name, model in zip(("whole", "stopped"), models):
        cluster_ddp.load_weights(tmp_path / name / "run", model)
    first, second = (model.state_dict() for model in models)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_all_modes_on_two_ranks(tmp_path: Path) -> None:
    small = (*SMALL, "--samples", "4", "--batch-size", "1")
    rates = ("--lr", "0.1", "--warmup-steps", "1", "--decay-after", "1", "2")
    ends = run(tmp_path / "train", *small, *rates, name=NAME, ranks=2)
    assert [end.exit_code for end in ends] == [0, 0], ends
    assert "Real global batch: 2 ranks x batch 1 = 2 images; learning rate 0.00625" in ends[0].output
    records = logged(tmp_path / "train" / "run")
    maps = [record["mAP"] for record in records if record["kind"] == "test"]
    trained = [(record["epoch"], record["step"], record["lr"]) for record in records if record["kind"] == "train"]
    assert [(epoch, step) for epoch, step, _ in trained] == [(1, 1), (1, 2), (2, 3), (2, 4)]
    assert [lr for *_, lr in trained] == pytest.approx([0.00625, 0.000625, 0.000625, 0.0000625])  # of the next steps
    assert [record["epoch"] for record in records if record["kind"] == "test"] == [1, 2]
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


def test_it_is_short() -> None:
    files = [EXAMPLES / NAME, *(EXAMPLES / "detection_parts").glob("*.py")]
    assert len(files) <= 4
    assert sum(len(path.read_text().splitlines()) for path in files) <= 301
