"""SSD300 with a ResNet, on COCO or on generated images. It resumes after a stop, with the same result.

python examples/detection.py                                         generated images: a CPU will do
CUDA_VISIBLE_DEVICES=3,4 torchrun --nproc-per-node 2 examples/detection.py
cluster-ddp submit --nodes 2 --gpus-per-node 8 -- \\
    python examples/detection.py --config examples/detection.toml --data COCO
python examples/detection.py --mode evaluation --weights runs/training-12/checkpoints/best-mAP.pt
python examples/detection.py --mode benchmark-training               or benchmark-inference
"""

import sys
from argparse import Namespace

import torch
from detection_parts import read_options
from detection_parts.data import Boxes, evaluate, load
from detection_parts.model import ssd300
from torch import optim

import cluster_ddp


class Training:
    """The model, and what trains it. All attributes have a state, which checkpoints keep."""

    def __init__(self, options: Namespace, world: cluster_ddp.World, classes: int, steps_per_epoch: int) -> None:
        self.model = world.wrap(ssd300(options, world, classes))
        world.seed_rank(options.seed)  # from here on each rank draws other random numbers
        lr = options.lr * world.world_size * options.batch_size / 32  # options.lr is for 32 images a step
        self.optimizer = optim.SGD(self.model.parameters(), lr, options.momentum, weight_decay=options.weight_decay)
        milestones = [max(1, epoch * steps_per_epoch - options.warmup_steps) for epoch in options.decay_after]
        decay = optim.lr_scheduler.MultiStepLR(self.optimizer, milestones)  # its steps count from the warm-up's end
        rise = optim.lr_scheduler.LinearLR(self.optimizer, 0.01, total_iters=options.warmup_steps)
        self.scheduler = optim.lr_scheduler.SequentialLR(self.optimizer, [rise, decay], [options.warmup_steps])
        self.scaler = world.grad_scaler(getattr(torch, options.amp, torch.float32))
        batch = f"{world.world_size} ranks x batch {options.batch_size} = {world.world_size * options.batch_size}"
        world.print(f"Real global batch: {batch} images; learning rate {lr:.3g}")

    def step(self, images: tuple[torch.Tensor, ...], targets: tuple[Boxes, ...]) -> torch.Tensor:
        """Train on a batch; return its loss."""
        loss: torch.Tensor = sum(self.model(images, targets).values())
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        return loss


def train(options: Namespace, world: cluster_ddp.World, shard: cluster_ddp.Shard, training: Training) -> None:
    """Train; after the epochs of --evaluate-after, evaluate and keep the best checkpoint."""
    test_shard, meters = load(options, world, train=False)[0], {"loss": cluster_ddp.Meter(world)}
    checkpoint = cluster_ddp.Checkpointer(world, shard=shard, resume=options.resume, meters=meters, **vars(training))
    for epoch in (done + 1 for done in checkpoint.epochs(options.epochs)):
        training.model.train()
        for images, targets in shard:
            meters["loss"].add(training.step(images, targets) * len(images), len(images))
            step = checkpoint.steps + 1
            if step % options.report_every == 0:
                loss, lr = meters["loss"].mean(), training.optimizer.param_groups[0]["lr"]
                meters["loss"].reset()
                world.log("train", epoch=epoch, step=step, loss=loss, lr=lr, samples_per_s=shard.samples_per_s)
                world.print(f"epoch {epoch}, step {shard.step + 1}/{len(shard)}: loss {loss:.4f}")
            checkpoint.step()
        if epoch in options.evaluate_after:
            mean_ap = evaluate(world, training.model.module, test_shard, checkpoint.stop_if_asked)
            world.log("test", epoch=epoch, mAP=mean_ap)
            world.print(f"epoch {epoch}: mAP {mean_ap:.4f}" + " (the best)" * checkpoint.best("mAP", mean_ap))


def benchmark(options: Namespace, world: cluster_ddp.World, shard: cluster_ddp.Shard, training: Training) -> None:
    """Print the images per second of all ranks together, loading included."""
    training.model.train(options.mode == "benchmark-training")
    with torch.set_grad_enabled(training.model.training):
        for epoch in (0, 1):  # the first one warms up
            shard.set_epoch(epoch)
            for _, (images, targets) in zip(range(options.benchmark_steps), shard):
                training.step(images, targets) if training.model.training else training.model.module(images)
            world.barrier()
    place = f"{world.world_size} x {world.device.type}, {options.backbone}, batch {options.batch_size}"
    world.print(f"{options.mode}: {shard.samples_per_s:.1f} images/s ({place}, AMP {options.amp})")


options = read_options(sys.argv[1:])
with cluster_ddp.distributed() as world:
    shard, classes = load(options, world, train=options.mode != "evaluation")
    if options.mode == "evaluation":
        model = ssd300(options, world, classes)
        path = cluster_ddp.load_weights(options.weights, model)
        world.print(f"{path}: mAP {evaluate(world, model, shard):.4f}")
    else:
        training = Training(options, world, classes, len(shard))
        (train if options.mode == "training" else benchmark)(options, world, shard, training)
