"""COCO's images and boxes."""

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.datasets import CocoDetection
from torchvision.transforms import v2

import cluster_ddp


def need_pycocotools() -> None:
    """Raise an error with a command that installs it, if it is missing."""
    try:
        import pycocotools.cocoeval  # noqa: F401
    except ImportError:
        asked = "Reading COCO's annotations, or computing the mAP:"
        raise cluster_ddp.SpecError(asked, "pycocotools is not installed.", "pip install pycocotools") from None


class CocoBoxes(Dataset[Any]):
    """COCO of 2017. Its 80 categories, whose numbers have gaps, get the labels 1 to 80.

    To train on, images without boxes are left out, and the others are augmented as torchvision does for SSD.
    """

    def __init__(self, folder: str, *, train: bool) -> None:
        part = "train2017" if train else "val2017"
        annotations = Path(folder) / "annotations" / f"instances_{part}.json"
        if not annotations.is_file():
            found, hint = f"there is no {annotations}.", "images and annotations: https://cocodataset.org/#download"
            raise cluster_ddp.DataError(f"COCO in {folder}:", found, hint)
        need_pycocotools()
        with contextlib.redirect_stdout(io.StringIO()):
            self.images = CocoDetection(Path(folder) / part, str(annotations))
        coco = self.images.coco
        for one in coco.anns.values():
            one.pop("segmentation", None)  # most of the memory, and each worker would get a copy
        self.categories = tuple(sorted(coco.getCatIds()))
        if train:
            self.images.ids = [one for one in self.images.ids if any(map(is_box, coco.imgToAnns[one]))]
        self.transform = transform(train=train)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, dict[str, Any]]:
        image, annotations = self.images[index]
        found = [one for one in annotations if is_box(one)]
        xywh = torch.tensor([one["bbox"] for one in found], dtype=torch.float32).reshape(-1, 4)
        boxes = tv_tensors.BoundingBoxes(xywh, format="XYWH", canvas_size=(image.height, image.width))
        labels = torch.tensor([1 + self.categories.index(one["category_id"]) for one in found], dtype=torch.int64)
        target = {"boxes": boxes, "labels": labels, "image_id": self.images.ids[index]}
        image, target = self.transform(image, target)
        return image, target

    def truth(self) -> Any:
        """Return the boxes as a COCO of pycocotools."""
        return self.images.coco


def is_box(annotation: dict[str, Any]) -> bool:
    """Whether it is the box of one object, not of a crowd, and has an area."""
    return not annotation["iscrowd"] and annotation["bbox"][2] > 0 and annotation["bbox"][3] > 0


def transform(*, train: bool) -> v2.Compose:
    """Return what makes tensors of an image and its boxes."""
    steps = [v2.ToImage(), v2.ConvertBoundingBoxFormat("XYXY")]
    if train:
        steps += [v2.RandomPhotometricDistort(), v2.RandomZoomOut(fill=(123, 117, 104)), v2.RandomIoUCrop()]
        # The model would resize the images, too, in the same way; small ones are copied to a GPU faster.
        steps += [v2.RandomHorizontalFlip(), v2.Resize((300, 300), antialias=False), v2.SanitizeBoundingBoxes()]
    return v2.Compose([*steps, v2.ToDtype(torch.float32, scale=True), v2.ToPureTensor()])
