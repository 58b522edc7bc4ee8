"""Data and model by the options, and a training step."""

import argparse
import math
from typing import Any

import torch

import cluster_ddp
from detection_parts.coco import CocoBoxes
from detection_parts.generated import GeneratedBoxes
from detection_parts.model import autocast, new_optimizer, new_scheduler, ssd300


def load(options: argparse.Namespace, world: cluster_ddp.World, *, train: bool) -> tuple[Any, cluster_ddp.Shard]:
    """Return a dataset, and this rank's batches of it: tuples of images and of targets, which differ in size."""
    size = options.samples
    if options.data:
        data: Any = CocoBoxes(options.data, train=train)
    else:
        data = GeneratedBoxes(size) if train else GeneratedBoxes(max(1, size // 4), first=size)
    loader = {"collate_fn": collate, "num_workers": options.workers}
    seed = options.seed if train else None
    return data, world.shard(data, batch_size=options.batch_size, shuffle_seed=seed, **loader)


def collate(samples: list[Any]) -> tuple[Any, ...]:
    """Return a batch: a tuple of images and one of targets."""
    return tuple(zip(*samples))


def new_model(options: argparse.Namespace, world: cluster_ddp.World, data: Any) -> torch.nn.Module:
    """Return a model for the classes of a dataset, with random weights or those of --backbone-weights."""
    torch.manual_seed(options.seed)
    return ssd300(options.backbone, len(data.categories), options.backbone_weights).to(world.device)


class Training:
    """Data, model, optimizer and learning rate; `step` trains on a batch."""

    def __init__(self, options: argparse.Namespace, world: cluster_ddp.World) -> None:
        self.options, self.world = options, world
        data, self.shard = load(options, world, train=True)
        self.model = world.wrap(new_model(options, world, data))
        world.seed_rank(options.seed)
        per_gpu = options.batch_size * options.accumulate
        lr = options.lr * cluster_ddp.lr_scale(world, per_gpu, base_batch=32)
        self.optimizer = new_optimizer(options, self.model, lr)
        self.scheduler = new_scheduler(options, self.optimizer, math.ceil(len(self.shard) / options.accumulate))
        self.scaler = world.grad_scaler(torch.float16 if options.amp == "float16" else torch.float32)
        batch = f"{world.world_size} ranks x batch {options.batch_size} x accumulation {options.accumulate}"
        world.print(f"Real global batch: {batch} = {world.world_size * per_gpu} images; learning rate {lr:.3g}")

    def step(self, images: Any, targets: Any) -> tuple[torch.Tensor, bool]:
        """Train on a batch. Return its loss, and whether it was the last one of an update."""
        every = self.options.accumulate
        with self.world.accumulate(self.model, self.shard, every=every) as is_last:
            with autocast(self.options, self.world):
                loss: torch.Tensor = sum(self.model(images, targets).values())
            self.scaler.scale(loss / every).backward()
        if is_last:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.scheduler.step()
        return loss.detach(), is_last
