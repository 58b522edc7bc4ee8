"""Images with boxes, COCO's or generated ones, and the mean average precision (mAP) of the boxes that a model finds."""

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import Dataset, Subset
from torchvision import tv_tensors
from torchvision.ops import box_area, box_iou
from torchvision.transforms import v2

from cluster_ddp import DataError, Shard, World

Boxes = dict[str, Any]  # of an image: boxes (N, 4) as x1, y1, x2, y2 in pixels; labels (N); is_crowd (N) or scores (N)
IOUS, RECALLS = 0.5 + 0.05 * torch.arange(10).double(), 0.01 * torch.arange(101).double()  # those of COCO's mAP


class GeneratedImages(Dataset[Any]):
    """Noise with one to three rectangles, each in a quarter of the image. A rectangle's colour is its class, 1 to 3."""

    def __getitem__(self, seed: int) -> tuple[torch.Tensor, Boxes]:
        random = torch.Generator().manual_seed(seed)
        image = 0.4 * torch.rand(3, 300, 300, generator=random)
        quarters = 150 * torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])[torch.randperm(4, generator=random)]
        starts = quarters[: 1 + seed % 3] + torch.randint(0, 60, (1 + seed % 3, 2), generator=random)
        boxes = torch.hstack([starts, starts + torch.randint(40, 90, starts.shape, generator=random)])
        labels = torch.randint(1, 4, (len(boxes),), generator=random)
        for label, (x1, y1, x2, y2) in zip(labels, boxes):
            image[label - 1, y1:y2, x1:x2] += 0.6
        return image, {"boxes": boxes.float(), "labels": labels, "is_crowd": labels == 0, "image_id": seed}


class CocoImages(Dataset[Any]):
    """COCO's images of 2017 by their ids. Labels are its category ids, 1 to 90."""

    def __init__(self, folder: str, *, train: bool) -> None:
        part = "train2017" if train else "val2017"
        self.folder, annotations = Path(folder, part), Path(folder, "annotations", f"instances_{part}.json")
        if not annotations.is_file():
            raise DataError(
                f"COCO in {folder}:", f"there is no {annotations}.", "see https://cocodataset.org/#download"
            )
        content = json.loads(annotations.read_text())
        self.classes = max(one["id"] for one in content["categories"])
        self.files = {one["id"]: one["file_name"] for one in content["images"]}
        self.rows: dict[int, list[list[float]]] = {image: [] for image in sorted(self.files)}
        for one in content["annotations"]:
            if not train or (not one["iscrowd"] and min(one["bbox"][2:]) > 0):
                self.rows[one["image_id"]].append([*one["bbox"], one["category_id"], one["iscrowd"]])
        self.ids = [image for image, rows in self.rows.items() if rows or not train]
        # As torchvision does for SSD. The model would resize images, too, but small ones are copied to a GPU faster.
        augment = [v2.RandomPhotometricDistort(), v2.RandomZoomOut(fill=(123, 117, 104)), v2.RandomIoUCrop()]
        augment += [v2.RandomHorizontalFlip(), v2.Resize((300, 300), antialias=False), v2.SanitizeBoundingBoxes()]
        begin, end = [v2.ConvertBoundingBoxFormat("XYXY")], [v2.ToDtype(torch.float32, scale=True), v2.ToPureTensor()]
        self.transform = v2.Compose([*begin, *(augment if train else []), *end])

    def __getitem__(self, number: int) -> Any:
        image = v2.functional.to_image(Image.open(self.folder / self.files[number]).convert("RGB"))
        rows = torch.tensor(self.rows[number], dtype=torch.float32).reshape(-1, 6)
        boxes = tv_tensors.BoundingBoxes(rows[:, :4], format="XYWH", canvas_size=image.shape[1:])
        target = {"boxes": boxes, "labels": rows[:, 4].long(), "is_crowd": rows[:, 5] > 0, "image_id": number}
        return self.transform(image, target)


def load(options: Namespace, world: World, *, train: bool) -> tuple[Shard, int]:
    """Return this rank's batches of images, which differ in size, and of their boxes; and the number of classes."""
    if options.data:
        coco = CocoImages(options.data, train=train)
        data, classes = Subset(coco, coco.ids), coco.classes
    else:
        seeds = range(options.samples) if train else range(-options.samples // 4, 0)
        data, classes = Subset(GeneratedImages(), seeds), 3
    loader: dict[str, Any] = {"num_workers": options.workers, "collate_fn": lambda samples: tuple(zip(*samples))}
    seed = options.seed if train else None
    return world.shard(data, batch_size=options.batch_size, shuffle_seed=seed, **loader), classes


@torch.no_grad()
def evaluate(world: World, model: torch.nn.Module, shard: Shard, after_batch: Callable[[], object] = bool) -> float:
    """Return the mAP of all ranks' images together, the same on every rank."""
    for buffer in model.buffers():  # BatchNorm's statistics differ between ranks; checkpoints have those of rank 0
        torch.distributed.broadcast(buffer, 0)
    model.eval()
    matches: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for images, targets in shard:
        found = model(images)
        world.synchronize()
        matches |= {true["image_id"]: match(true, one) for true, one in zip(targets, found)}
        if shard.seen < shard.size:  # in the last batch of a small set, some ranks have no images
            after_batch()
    of_all = {image: one for of_rank in world.gather(matches) for image, one in of_rank.items()}
    return mean_average_precision([of_all[image] for image in sorted(of_all)])


def match(true: Boxes, found: Boxes) -> tuple[torch.Tensor, torch.Tensor]:
    """Return label, score, and at each IoU 1 (hit), -1 (miss) or 0 (in a crowd) of found boxes; and the true labels."""
    true, found = ({name: torch.as_tensor(value).cpu() for name, value in one.items()} for one in (true, found))
    scores, order = found["scores"].sort(descending=True, stable=True)
    labels, boxes = found["labels"][order], found["boxes"][order].double()
    truth, crowd = true["boxes"].double(), true["is_crowd"]
    ious = box_iou(boxes, truth) * (labels[:, None] == true["labels"])
    covered = ious / (1 + ious) * (1 + box_area(truth) / box_area(boxes)[:, None]) * crowd  # the boxes' part in a crowd
    marks = torch.where(F.pad(covered, (0, 1)).amax(1, keepdim=True) >= IOUS, 0.0, -1.0)
    ious, is_free = F.pad(ious * ~crowd, (0, 1)), torch.ones(len(IOUS), len(crowd) + 1)
    for mark, overlaps in zip(marks, ious):  # the best boxes choose first
        iou, nearest = (overlaps * is_free).max(1)
        mark[iou >= IOUS] = 1
        is_free[iou >= IOUS, nearest[iou >= IOUS]] = 0
    is_counted = (labels[:, None] == labels).tril(-1).sum(1) < 100  # the best 100 of each class
    return torch.column_stack([labels, scores, marks])[is_counted], true["labels"][~crowd]


def mean_average_precision(matches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return COCO's mAP of all images' matches: the mean precision over classes, IoUs and recalls."""
    rows, labels = map(torch.cat, zip(*matches))
    rows, means = rows[rows[:, 1].argsort(descending=True, stable=True)], []
    for label, count in zip(*labels.unique(return_counts=True)):
        marks = rows[rows[:, 0] == label, 2:]
        hits, misses = (marks > 0).double().cumsum(0), (marks < 0).double().cumsum(0)
        precision = (hits / (hits + misses).clamp(min=1)).flip(0).cummax(0).values.flip(0)  # at this recall or more
        reached = torch.searchsorted((hits / count).T.contiguous(), RECALLS.repeat(len(IOUS), 1))
        means.append(F.pad(precision, (0, 0, 0, 1)).T.gather(1, reached).mean())
    return float(torch.stack(means).mean())
