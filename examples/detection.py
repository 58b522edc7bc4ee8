"""SSD300 with a ResNet, on COCO or on generated boxes.

cluster-ddp submit --nodes 2 --gpus-per-node 8 -- \\
    python examples/detection.py --config examples/detection.toml --data COCO
python examples/detection.py                                      on generated boxes; a CPU will do
python examples/detection.py --mode evaluation --weights runs/training-12/checkpoints/best-mAP.pt
python examples/detection.py --mode benchmark-training            or benchmark-inference: images/s
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from detection_parts.coco import need_pycocotools
from detection_parts.mean_average_precision import evaluate
from detection_parts.model import autocast
from detection_parts.options import read
from detection_parts.training import Training, load, new_model

import cluster_ddp

BENCHMARK_WARMUP_STEPS = 5


def train(options: argparse.Namespace, world: cluster_ddp.World) -> None:
    """Train; evaluate and keep the best checkpoint after the epochs of --evaluate-at."""
    if options.evaluate_at:
        need_pycocotools()
    training, meter = Training(options, world), cluster_ddp.Meter(world)
    tests = load(options, world, train=False)
    parts = {name: getattr(training, name) for name in ("model", "optimizer", "scheduler", "scaler")}
    shard, meters = training.shard, {"loss": meter}
    checkpoint = cluster_ddp.Checkpointer(world, shard=shard, resume=options.resume, meters=meters, **parts)
    for epoch in checkpoint.epochs(options.epochs):
        training.model.train()
        for images, targets in shard:
            loss, is_update = training.step(images, targets)
            meter.add(loss * len(images), len(images))
            if is_update and (checkpoint.steps + 1) % options.report_every == 0:
                mean, lr = meter.mean(), training.optimizer.param_groups[0]["lr"]
                values = {"epoch": epoch, "step": checkpoint.steps + 1, "loss": mean, "lr": lr}
                world.log("train", **values, samples_per_s=shard.samples_per_s)
                world.print(f"epoch {epoch}, step {shard.step + 1}/{len(shard)}: loss {mean:.4f}")
                meter.reset()
            if is_update:
                checkpoint.step()
        if epoch in options.evaluate_at:
            map_ = evaluate(options, world, training.model.module, *tests, checkpoint.stop_if_asked)
            world.log("test", epoch=epoch, mAP=map_)
            is_best = checkpoint.best("mAP", map_)
            world.print(f"epoch {epoch}: mAP {map_:.4f}{' (the best)' if is_best else ''}")


def evaluation(options: argparse.Namespace, world: cluster_ddp.World) -> None:
    """Print the mAP of --weights."""
    need_pycocotools()
    data, shard = load(options, world, train=False)
    model = new_model(options, world, data)
    path = cluster_ddp.load_weights(options.weights, model)
    map_ = evaluate(options, world, model, data, shard)
    world.print(f"{path}: mAP {map_:.4f}")


def benchmark(options: argparse.Namespace, world: cluster_ddp.World) -> None:
    """Print the images per second of all ranks together, loading included."""
    step: Callable[[Any, Any], object]
    if options.mode == "benchmark-training":
        training = Training(options, world)
        shard, step = training.shard, training.step
    else:
        data, shard = load(options, world, train=True)
        step = inference(options, world, new_model(options, world, data).eval())
    images_seen, start_s = 0, 0.0
    for number, (images, targets) in zip(range(BENCHMARK_WARMUP_STEPS + options.benchmark_steps), endless(shard)):
        if number == BENCHMARK_WARMUP_STEPS:
            world.barrier()
            images_seen, start_s = 0, time.perf_counter()
        step(images, targets)
        images_seen += len(images)
    world.synchronize()
    images_per_s = world.sum(images_seen)[0] / world.max(time.perf_counter() - start_s)
    place = (
        f"{world.world_size} x {world.device.type}, {options.backbone}, batch {options.batch_size}, AMP {options.amp}"
    )
    world.print(f"{options.mode}: {images_per_s:.1f} images/s ({place})")


def inference(
    options: argparse.Namespace, world: cluster_ddp.World, model: torch.nn.Module
) -> Callable[[Any, Any], object]:
    """Return a step that finds the boxes of a batch."""

    @torch.no_grad()
    def step(images: Any, targets: Any) -> object:
        with autocast(options, world):
            return model(images)

    return step


def endless(shard: cluster_ddp.Shard) -> Iterator[Any]:
    """Yield batches, epoch after epoch."""
    for epoch in itertools.count():
        shard.set_epoch(epoch)
        yield from shard


def main() -> None:
    """Read the options, and do what --mode says."""
    options = read(sys.argv[1:])
    with cluster_ddp.distributed() as world:
        {"training": train, "evaluation": evaluation}.get(options.mode, benchmark)(options, world)


if __name__ == "__main__":
    main()
