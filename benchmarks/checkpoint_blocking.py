"""How long a save keeps training waiting: `python benchmarks/checkpoint_blocking.py [--mb 500] [--rounds 9]`.

For the reference training: the time of a `Checkpointer.step` that saves, after a real step of the optimizer. For a
large model: the same, alternating with a save of the same state in the foreground (copy, write, SHA-256, fsync); and
the look for NaN and Inf, which each save makes in the background. And the digest of 100 MB that each rank makes in each
save, to compare it with other ranks'.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from record import Figure, report

import cluster_ddp
from cluster_ddp.mnist.model import Net
from cluster_ddp.runtime.checkpoint import checkpoint_file
from cluster_ddp.runtime.checkpoint.exactness.rank_differences import RankDifferences
from cluster_ddp.runtime.checkpoint.host_copy import HostCopy
from cluster_ddp.runtime.non_finite import FiniteState
from cluster_ddp.runtime.run_dir.run_dir import RunDir
from cluster_ddp.runtime.world import World

REFERENCE_MS_AT_MOST = 5.0
SHARE_AT_MOST = 0.05
LOOK_AT_MOST = 0.1
DIGEST_AT_MOST = 0.01
DIGEST_MB = 100
SAVES = 30
LAYERS = 10


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=500, help="size of the large model, in 10**6 bytes")
    parser.add_argument("--rounds", type=int, default=9, help="its saves of each kind (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    options = parser.parse_args()
    logging.getLogger("cluster_ddp").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, cluster_ddp.distributed(cuda=False) as world:
        figures = [*reference(world, Path(folder, "small")), *large(world, Path(folder, "large"), options)]
        report(*figures, digest(world, Path(folder), options.rounds))


def reference(world: World, folder: Path) -> list[Figure]:
    """Save the reference training's model and optimizer after each step."""
    model = world.wrap(Net())
    optimizer = torch.optim.Adadelta(model.parameters())
    checkpoint = cluster_ddp.Checkpointer(
        world, run_dir=RunDir(folder, world), every="1steps", keep=1, model=model, optimizer=optimizer
    )
    images, labels = torch.randn(64, 1, 28, 28), torch.zeros(64, dtype=torch.int64)
    taken_ms = []
    for _ in checkpoint.until(1 + SAVES):
        checkpoint._folder.writer.wait()
        optimizer.zero_grad()
        F.nll_loss(model(images), labels).backward()
        optimizer.step()
        taken_ms.append(1000 * seconds(checkpoint.step))
    first, *others = taken_ms  # the first save also gets the memory for its copy
    size_mb = checkpoint.last_good.stat().st_size / 1e6 if checkpoint.last_good else 0
    what = f"the reference training's state, {size_mb:.0f} MB: blocked for"
    return [
        Figure(what=what, values=others, unit="ms", at_most=REFERENCE_MS_AT_MOST),
        Figure(what="… the longest", values=[max(others)], unit="ms"),
        Figure(what="… the first save", values=[first], unit="ms"),
    ]


def large(world: World, folder: Path, options: argparse.Namespace) -> list[Figure]:
    """Save a large model in the background and in the foreground."""
    model = world.wrap(model_of(options.mb))
    checkpoint = cluster_ddp.Checkpointer(world, run_dir=RunDir(folder, world), every="1steps", keep=1, model=model)
    copy, finite = HostCopy(world.device), FiniteState({"model": model.module})
    foreground, background, look = [], [], []
    for _ in checkpoint.until(1 + options.rounds):  # the first round gets the memory from the system
        checkpoint._folder.writer.wait()
        foreground.append(
            seconds(lambda: checkpoint_file.write(folder / "foreground.pt", copy.of(model.module.state_dict())))
        )
        background.append(seconds(checkpoint.step))
        look.append(seconds(lambda: finite.non_finite({"model": model.module.state_dict()})))
    in_foreground = f"{options.mb} MB: saved in the foreground"
    return [
        Figure(what=in_foreground, values=foreground[1:], unit="s"),
        Figure(
            what=f"{options.mb} MB: blocked for",
            values=background[1:],
            unit="s",
            ratios=[ours / theirs for ours, theirs in zip(background[1:], foreground[1:])],
            peer="in the foreground",
            at_most=SHARE_AT_MOST,
        ),
        Figure(
            what=f"{options.mb} MB: looked through for NaN, in the background",
            values=look[1:],
            unit="s",
            ratios=[ours / theirs for ours, theirs in zip(look[1:], foreground[1:])],
            peer="in the foreground",
            at_most=LOOK_AT_MOST,
        ),
    ]


def digest(world: World, folder: Path, rounds: int) -> Figure:
    """Take the digest of a model with Adam's state, of all tensors some and in the next save others."""
    model = model_of(DIGEST_MB / 3)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
    copy, differences = HostCopy(world.device), RankDifferences(world, parts)
    foreground, taken = [], []
    for _ in range(1 + rounds):
        states = {name: part.state_dict() for name, part in parts.items()}
        foreground.append(seconds(lambda: checkpoint_file.write(folder / "digest.pt", copy.of(states))))  # noqa: B023
        taken.append(seconds(differences.digests))
    return Figure(
        what=f"{DIGEST_MB} MB: compared with other ranks",
        values=[1000 * one for one in taken[1:]],
        unit="ms",
        ratios=[ours / theirs for ours, theirs in zip(taken[1:], foreground[1:])],
        peer="saved in the foreground",
        at_most=DIGEST_AT_MOST,
    )


def model_of(mb: float) -> torch.nn.Module:
    """Linear layers with `mb` megabytes (10**6 bytes) of float32 weights in all."""
    width = round((mb * 1e6 / 4 / LAYERS) ** 0.5)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


def seconds(action: Callable[[], object]) -> float:
    """How long a call of `action` takes."""
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s


if __name__ == "__main__":
    main()
