"""COCO's mean average precision of all ranks' images, by pycocotools."""

import argparse
import contextlib
import io
from collections.abc import Callable

import torch
from torch import nn
from torchvision.ops import box_convert

import cluster_ddp
from detection_parts.coco import CocoBoxes
from detection_parts.generated import GeneratedBoxes
from detection_parts.model import autocast


@torch.no_grad()
def evaluate(
    options: argparse.Namespace,
    world: cluster_ddp.World,
    model: nn.Module,
    data: CocoBoxes | GeneratedBoxes,
    shard: cluster_ddp.Shard,
    after_batch: Callable[[], object] = lambda: None,
) -> float:
    """Return the mAP (IoU 0.5 to 0.95), the same on every rank. A collective."""
    for buffer in model.buffers():  # BatchNorm's statistics differ between ranks; checkpoints have those of rank 0
        torch.distributed.broadcast(buffer, 0)
    model.eval()
    categories = torch.tensor([0, *data.categories], dtype=torch.float64)
    rows = [torch.empty(0, 7, dtype=torch.float64)]
    for images, targets in shard:
        with autocast(options, world):
            detections = model(images)
        world.synchronize()
        for target, found in zip(targets, detections):
            boxes, scores, labels = (found[name].cpu() for name in ("boxes", "scores", "labels"))
            ids = torch.full_like(scores, target["image_id"], dtype=torch.float64)
            rows.append(torch.column_stack([ids, box_convert(boxes, "xyxy", "xywh"), scores, categories[labels]]))
        if shard.seen < shard.size:  # in the last batch of a small set, some ranks have no images
            after_batch()
    of_ranks = world.gather_to_main(torch.cat(rows))
    return world.broadcast(0.0 if of_ranks is None else mean_average_precision(torch.cat(of_ranks), data))


def mean_average_precision(detections: torch.Tensor, data: CocoBoxes | GeneratedBoxes) -> float:
    """Return the mAP of rows of image id, x, y, width, height, score, category."""
    from pycocotools.cocoeval import COCOeval

    if len(detections) == 0:
        return 0.0
    with contextlib.redirect_stdout(io.StringIO()):
        truth = data.truth()
        evaluation = COCOeval(truth, truth.loadRes(detections.numpy()), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[0])
