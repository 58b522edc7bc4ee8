"""Generated images with boxes, to try the training without a download."""

from typing import Any

import torch
from torch.utils.data import Dataset


class GeneratedBoxes(Dataset[Any]):
    """Noise with one to three rectangles, each in a quarter of the image. Its colour is its class."""

    categories = (1, 2, 3)

    def __init__(self, size: int, first: int = 0) -> None:
        self.size, self.first = size, first

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, dict[str, Any]]:
        random = torch.Generator().manual_seed(self.first + index)  # an image depends on its index only
        image = 0.4 * torch.rand(3, 300, 300, generator=random)
        count = 1 + index % 3
        labels = torch.randint(1, 4, (count,), generator=random)
        quarters = 150 * torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])[torch.randperm(4, generator=random)[:count]]
        starts = quarters + torch.randint(0, 60, (count, 2), generator=random)
        boxes = torch.hstack([starts, starts + torch.randint(40, 90, (count, 2), generator=random)])
        for label, (x1, y1, x2, y2) in zip(labels.tolist(), boxes.tolist()):
            image[label - 1, y1:y2, x1:x2] += 0.6
        return image, {"boxes": boxes.float(), "labels": labels, "image_id": index}

    def truth(self) -> Any:
        """Return the boxes as a COCO of pycocotools."""
        from pycocotools.coco import COCO

        boxes: list[dict[str, Any]] = []
        for index in range(self.size):
            target = self[index][1]
            for (x1, y1, x2, y2), label in zip(target["boxes"].tolist(), target["labels"].tolist()):
                size = {"bbox": [x1, y1, x2 - x1, y2 - y1], "area": (x2 - x1) * (y2 - y1), "iscrowd": 0}
                boxes.append({"id": len(boxes) + 1, "image_id": index, "category_id": label, **size})
        images, categories = ([{"id": one} for one in ids] for ids in (range(self.size), self.categories))
        truth = COCO()
        truth.dataset = {"images": images, "categories": categories, "annotations": boxes}
        truth.createIndex()
        return truth
