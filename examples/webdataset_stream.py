"""Data that is too large for an index or a disk: tar files of samples, as WebDataset has them, read as a stream.

python examples/webdataset_stream.py                             makes 16 small tar files itself, and trains on them
torchrun --nproc-per-node 2 examples/webdataset_stream.py
cluster-ddp submit --nodes 2 --gpus-per-node 2 -- python examples/webdataset_stream.py --workers 2

Each rank and each of its workers reads tar files of its own, in another order in each epoch. A resume begins in the
middle of a tar file, with the sample after the last one that was trained: docs/how-to/streams.md says how.
"""

import argparse
import io
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

import cluster_ddp


def make_tars(folder: Path, *, tars: int = 16, samples: int = 60) -> None:
    """Write tar files, unless they are there. A sample has two members: 000007.cls (a label), 000007.f32 (numbers)."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(4, 16, generator=generator)
    for number in range(tars):
        labels = torch.randint(4, (samples,), generator=generator)
        points = centres[labels] + torch.randn(samples, 16, generator=generator)
        if (path := folder / f"shard-{number:04}.tar").exists():
            continue
        with tarfile.open(path.with_suffix(".part"), "w") as tar:
            for key, (label, point) in enumerate(zip(labels, points)):
                for suffix, content in (("cls", str(int(label)).encode()), ("f32", point.numpy().tobytes())):
                    member = tarfile.TarInfo(f"{key:06}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        path.with_suffix(".part").rename(path)


class TarFiles(IterableDataset[tuple[torch.Tensor, int]]):
    """The samples of this rank's and this worker's tar files. Its state is the number of the file and of the sample."""

    def __init__(self, folder: Path, *, rank: int, world_size: int, seed: int) -> None:
        self.paths, self.rank, self.world_size, self.seed = sorted(folder.glob("*.tar")), rank, world_size, seed
        self.epoch, self.place = 0, (0, 0)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which shuffles the files."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return where the next sample is."""
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin there."""
        self.place = state["place"]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        # All draw the same order; then each takes its files.
        paths = random.Random(f"{self.seed} {self.epoch}").sample(self.paths, len(self.paths))
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        mine = paths[self.rank * workers + number :: self.world_size * workers]
        (first, skipped), self.place = self.place, (0, 0)
        for file in range(first, len(mine)):
            for sample, item in enumerate(samples_of(mine[file])):
                if file > first or sample >= skipped:
                    self.place = file, sample + 1
                    yield item
        self.place = (0, 0)


def samples_of(path: Path) -> Iterator[tuple[torch.Tensor, int]]:
    """Read the samples of a tar file in order."""
    with tarfile.open(path, "r|") as tar:  # "r|": never seeks, so that it could come from a network
        label = 0
        for member in tar:
            content = tar.extractfile(member)
            assert content is not None
            if member.name.endswith(".cls"):
                label = int(content.read())
            else:
                yield torch.frombuffer(bytearray(content.read()), dtype=torch.float32), label


def train(options: argparse.Namespace, world: cluster_ddp.World) -> None:
    """Train, and print the mean loss of each epoch."""
    with world.main_first():
        make_tars(options.data)
    torch.manual_seed(options.seed)
    model = world.wrap(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    files = TarFiles(options.data, rank=world.rank, world_size=world.world_size, seed=options.seed)
    stream = world.stream(files, split="own", batch_size=options.batch_size, num_workers=options.workers)
    losses = cluster_ddp.Meter(world)
    world.seed_rank(options.seed)  # another dropout on each rank
    checkpoint = cluster_ddp.Checkpointer(
        world, shard=stream, every="20steps", model=model, optimizer=optimizer, meters={"loss": losses}
    )
    for epoch in checkpoint.epochs(options.epochs):
        for points, labels in stream:
            loss = F.cross_entropy(model(points), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.add(loss * len(labels), len(labels))
            checkpoint.step()
        world.print(f"epoch {epoch + 1}: {stream.seen} samples, loss {losses.mean():.4f}")
        losses.reset()
    world.print(f"weights {world.weights_digest(model)[:16]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/tar-files"), help="folder of the tar files")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8, help="samples per rank and step")
    parser.add_argument("--workers", type=int, default=0, help="processes per rank that read")
    parser.add_argument("--seed", type=int, default=1, help="random seed for weights and the order of the files")
    options = parser.parse_args()
    with cluster_ddp.distributed() as world:
        train(options, world)
