"""How many images per second: steps of training or inference, timed one by one, without a log or a checkpoint."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator

from cluster_ddp import DataError, RunDir, RunDirError, Shard, World
from cluster_ddp.mnist import cuda_graphs, data
from cluster_ddp.mnist.config import TrainConfig, TrainResult
from cluster_ddp.mnist.hyperparameters import Recipe
from cluster_ddp.mnist.train_step import Step
from cluster_ddp.protocol import File, Record

_WARM_UP_STEPS, _STEPS = 3, 20


def run(config: TrainConfig, recipe: Recipe, world: World, run_dir: RunDir) -> TrainResult:
    """Time steps, print and log the medians. A collective."""
    train_shard, test_shard = data.shards(config, recipe.batch_size, world)
    step = Step(config, recipe, world)
    if config.tune == "always":
        step.tune()
    is_training = config.benchmark == "training"
    steps = _training(step, train_shard) if is_training else _inference(step, test_shard, world)
    for _ in range(cuda_graphs.STEPS_TO_CAPTURE if config.cuda_graph and is_training else _WARM_UP_STEPS):
        next(steps)
    seconds, rates = zip(*(_timed(steps, world) for _ in range(_STEPS)))
    step_s = world.max(statistics.median(seconds))
    (images_per_s,) = world.sum(statistics.median(rates))
    per_rank = images_per_s / world.world_size
    values = {
        "mode": config.benchmark,
        "images_per_s": round(images_per_s, 1),
        "images_per_s_per_rank": round(per_rank, 1),
        "step_s": round(step_s, 6),
        "steps": _STEPS,
        "ranks": world.world_size,
    }
    run_dir.log(Record.BENCHMARK, values)
    world.print(
        f"Benchmark of {config.benchmark}: {images_per_s:,.0f} images/s on {world.world_size} ranks, "
        f"{per_rank:,.0f} per rank (median of {_STEPS} steps, {1000 * step_s:.2f} ms on the slowest rank)"
    )
    return TrainResult(run_dir=run_dir.path, samples_per_s=images_per_s)


def check_is_free(run_dir: RunDir) -> None:
    """Check that no training uses a run directory: its records would be set aside.

    Raises:
        RunDirError: it has checkpoints.
    """
    if (run_dir.path / File.CHECKPOINTS).is_dir():
        asked = f"Writing to the run directory {run_dir.path}:"
        raise RunDirError(
            asked, "it is a training's, whose records would be moved.", "give another one: --run-dir PATH"
        )


def _timed(steps: Iterator[float], world: World) -> tuple[float, float]:
    """Seconds of a step, and its images per second on this rank."""
    world.synchronize()
    start_s = time.perf_counter()
    images = next(steps)
    world.synchronize()
    taken_s = time.perf_counter() - start_s
    return taken_s, images / taken_s


def _training(step: Step, shard: Shard) -> Iterator[float]:
    """Train forever. Yields after each update the images that a rank had for it, on average."""
    step.model.train()
    for epoch in itertools.count():
        shard.set_epoch(epoch)
        for images, labels in shard:
            step.backward(images, labels, shard)
            if step.is_update_due:
                step.update(0)
                yield step.mean_batch


def _inference(step: Step, shard: Shard, world: World) -> Iterator[float]:
    """Compute outputs forever. Yields after each batch the images that a rank had in it, on average."""
    if shard.size < world.world_size:
        found = f"{world.world_size} ranks can't share {shard.size} test images."
        raise DataError("A benchmark of inference:", found, "use fewer GPUs")
    step.model.eval()
    while True:
        for images, _ in shard:
            step.output(images)
            yield shard.mean_batch
