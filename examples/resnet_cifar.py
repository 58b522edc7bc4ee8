"""Train torchvision's ResNet-18 on images of 32x32: CIFAR-10, or made-up images. It resumes exactly after a stop.

python examples/resnet_cifar.py                                         made-up images: only to try it
torchrun --nproc-per-node 4 examples/resnet_cifar.py --data-dir data --epochs 30
cluster-ddp submit --nodes 2 --gpus-per-node 2 -- python examples/resnet_cifar.py --data-dir data --epochs 30

Compute nodes have no internet. To download CIFAR-10 on a login node:
python -c "from torchvision.datasets import CIFAR10; CIFAR10('data', download=True)"
"""

import argparse
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset
from torchvision import datasets, models, transforms

import cluster_ddp

# channels_last gives weights of 1x1 other strides than their gradients have, but the same order in memory.
warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")


def network() -> nn.Module:
    """ResNet-18 for small images: its first convolution is 3x3, and there is no pooling after it."""
    model: nn.Module = models.resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model.to(memory_format=torch.channels_last)


def images_of(options: argparse.Namespace, train: bool) -> Dataset[tuple[torch.Tensor, int]]:
    """CIFAR-10, or made-up images. Those for training are cropped and flipped at random, in the loader's workers."""
    steps = [transforms.ToTensor(), transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))]
    if train:
        steps = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), *steps]
    transform = transforms.Compose(steps)
    size, offset = (options.samples, 0) if train else (options.samples // 4, options.samples)
    dataset: Dataset[tuple[torch.Tensor, int]] = (
        datasets.CIFAR10(options.data_dir, train=train, transform=transform)
        if options.data_dir
        else datasets.FakeData(size, (3, 32, 32), transform=transform, random_offset=offset)  # from the index only
    )
    return dataset


def accuracy_of(model: nn.Module, shard: cluster_ddp.Shard, world: cluster_ddp.World) -> float:
    """The accuracy over all ranks."""
    model.eval()
    correct = seen = 0
    with torch.no_grad(), world.autocast():
        for images, labels in shard:
            logits = model(images.to(memory_format=torch.channels_last))
            correct += int((logits.argmax(1) == labels).sum())
            seen += len(labels)
    model.train()
    return world.mean(correct, seen)


def train(options: argparse.Namespace) -> None:
    """Train, keep the weights with the best accuracy, and evaluate them."""
    with cluster_ddp.distributed() as world:
        torch.manual_seed(options.seed)  # before the model: the same weights on all ranks
        model = world.wrap(network(), sync_batchnorm=True)
        lr = options.lr * world.world_size * options.batch_size / 128  # options.lr is for 128 images a step
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
        size, seed, workers = options.batch_size, options.seed, options.workers
        shard = world.shard(images_of(options, train=True), batch_size=size, shuffle_seed=seed, num_workers=workers)
        test_shard = world.shard(images_of(options, train=False), batch_size=size, num_workers=workers)
        warmup = max(1, options.epochs * len(shard) // 10)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9 * warmup)
        rise = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=warmup)
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, cosine], [warmup])
        losses = cluster_ddp.Meter(world)
        world.seed_rank(options.seed)  # from here on each rank draws other random numbers
        checkpoint = cluster_ddp.Checkpointer(
            world, shard=shard, meters={"loss": losses}, model=model, optimizer=optimizer, scheduler=scheduler
        )
        for epoch in checkpoint.epochs(options.epochs):
            for images, labels in shard:
                with world.autocast():
                    logits = model(images.to(memory_format=torch.channels_last))
                loss = F.cross_entropy(logits.float(), labels, label_smoothing=0.1)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                losses.add(loss * len(labels), len(labels))
                checkpoint.step()
            speed, loss_mean = shard.samples_per_s, losses.mean()
            losses.reset()
            world.log("train", epoch=epoch + 1, step=checkpoint.steps, loss=loss_mean, samples_per_s=speed)
            accuracy = accuracy_of(model.module, test_shard, world)
            world.log("test", epoch=epoch + 1, step=checkpoint.steps, accuracy=accuracy)
            checkpoint.best("accuracy", accuracy, mode="max")
            world.print(f"epoch {epoch + 1}: loss {loss_mean:.6f}, accuracy {accuracy:.4f}, {speed:.0f} images/s")
        best = network()
        if world.is_main:
            cluster_ddp.load_weights(checkpoint.run_dir.path / "checkpoints" / "best-accuracy.pt", best)
        world.print(f"best accuracy {accuracy_of(world.wrap(best).module, test_shard, world):.4f}")


def main() -> None:
    """Parse the options and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="folder of CIFAR-10 (cifar-10-batches-py); default: made-up images")
    parser.add_argument("--samples", type=int, default=128, help="made-up images to train on; a quarter to test on")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per rank and step")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate for a global batch of 128")
    parser.add_argument("--workers", type=int, default=2, help="loader processes of each rank")
    parser.add_argument("--seed", type=int, default=1, help="random seed for weights, shuffling and augmentation")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
