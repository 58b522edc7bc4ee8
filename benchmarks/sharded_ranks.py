"""What `sharded.py` measures, in each rank: memory, saves and loads, or a state of many tensors.

Rank 0 prints the values as JSON; of each, those of the slowest or largest rank.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, Shard

import cluster_ddp
from cluster_ddp.runtime.checkpoint import checkpoint_file
from cluster_ddp.runtime.model.dtensor_pieces import local_part

LAYERS, TOKENS, VOCABULARY = 17, 64, 8_000


class Block(nn.Module):
    """A layer of a GPT, without the mask of its attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 8, batch_first=True)
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), up, nn.GELU(), down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, changed: (batch, tokens, width)."""
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Of width 512 it has 58 million parameters, of 1024 222 million. The embedding is the head, too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(LAYERS)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits for tokens: (batch, tokens, VOCABULARY)."""
        return self.blocks(self.embedding(tokens)) @ self.embedding.weight.T  # type: ignore[no-any-return]


class Training:
    """A model under a strategy, with AdamW."""

    def __init__(self, world: cluster_ddp.World, strategy: str, width: int) -> None:
        self.world = world
        how: dict[str, Any] = {"strategy": strategy, **({} if strategy == "ddp" else {"blocks": Block})}
        self.model: nn.Module = world.wrap(GPT(width), **how)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.tokens = torch.randint(VOCABULARY, (1, TOKENS))

    def step(self) -> None:
        """Make one update."""
        logits = self.model(self.tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens.flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def checkpointer(self, folder: Path, **options: Any) -> cluster_ddp.Checkpointer:
        """Return a Checkpointer of model and optimizer."""
        parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        return cluster_ddp.Checkpointer(self.world, run_dir=folder, keep=1, **parts, **options)


def memory(world: cluster_ddp.World, options: argparse.Namespace) -> dict[str, list[float]]:
    """MiB that the model takes: between steps, and at the peak of a step."""
    before = _memory_mib("VmRSS")
    training = Training(world, options.strategy, options.width)
    for _ in range(3):
        training.step()
        between = _memory_mib("VmRSS") - before
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew (proc(5))
    training.step()
    return {"between steps": [between], "at peak": [_memory_mib("VmHWM") - before]}


def _memory_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def saves(world: cluster_ddp.World, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds that our saves and loads and those of DCP take, on the slowest rank."""
    training, found = Training(world, "fsdp", options.width), dict[str, list[float]]()
    training.step()
    checkpoint = training.checkpointer(options.folder / "ours", every="1steps")
    state = [one for part in (training.model, training.optimizer) for one in _tensors(part.state_dict())]
    copies = [torch.zeros_like(local_part(one)) for one in state]
    for number in checkpoint.until(1 + options.rounds):
        clock = Clock(world, found if number else {})  # the first save also gets the memory for its copy
        clock.measure("copy", lambda: [copy.copy_(local_part(one)) for one, copy in zip(state, copies)])
        clock.measure("blocked by ours", checkpoint.step)
        checkpoint._saver.wait()
        path = world.broadcast(checkpoint.last_good) or Path()
        clock.measure("digest", partial(_hash_own, path, world.rank))
        clock.measure("load by ours", partial(_load, training, _new(world, options.folder / "load"), path))
        dcp_folder = _new(world, options.folder / "dcp")
        clock.measure("blocked by DCP", partial(_dcp_save, training, dcp_folder))
        clock.measure("load by DCP", partial(_dcp_load, training, dcp_folder))
        dcp_folder = _new(world, options.folder / "async")
        saving = clock.measure("blocked by DCP async", partial(_dcp_async_save, training, dcp_folder))
        saving.result()
    return found


def _load(training: Training, run_dir: Path, path: Path) -> None:
    training.checkpointer(run_dir, every="never", resume=path)


def _dcp_state(training: Training) -> dict[str, Any]:
    model, optimizer = get_state_dict(training.model, training.optimizer)
    return {"model": model, "optimizer": optimizer}


def _dcp_save(training: Training, folder: Path) -> None:
    dcp.save(_dcp_state(training), checkpoint_id=folder)


def _dcp_async_save(training: Training, folder: Path) -> Any:
    return dcp.async_save(_dcp_state(training), checkpoint_id=folder)


def _dcp_load(training: Training, folder: Path) -> None:
    state = _dcp_state(training)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        training.model, training.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def _hash_own(path: Path, rank: int) -> None:
    checkpoint_file.digest(path)
    checkpoint_file.digest(next(path.with_suffix(".pieces").glob(f"rank-{rank}-*")))


class Many:
    """A state of many small tensors, sharded over all ranks."""

    def __init__(self, count: int) -> None:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        self.tensors = {f"layer.{i}.weight": DTensor.from_local(torch.ones(8), mesh, [Shard(0)]) for i in range(count)}

    def state_dict(self) -> dict[str, Any]:
        """Return them."""
        return dict(self.tensors)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take others."""
        self.tensors = state


def many(world: cluster_ddp.World, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of the slowest rank to save and load many tensors."""
    part, found = Many(options.tensors), dict[str, list[float]]()
    saving = cluster_ddp.Checkpointer(world, run_dir=options.folder / "ours", every="never", many=part)
    saving._state.steps = 1
    clock = Clock(world, found)
    clock.measure("save by ours", saving._saver.save_now)
    path = world.broadcast(saving.last_good)
    dcp_folder = _new(world, options.folder / "dcp")
    clock.measure("save by DCP", lambda: dcp.save({"many": part.state_dict()}, checkpoint_id=dcp_folder))
    for number in range(options.rounds):
        run_dir = _new(world, options.folder / f"load {number}")
        how: dict[str, Any] = {"run_dir": run_dir, "every": "never", "resume": path, "many": part}
        clock.measure("load by ours", partial(cluster_ddp.Checkpointer, world, **how))
        clock.measure("load by DCP", lambda: dcp.load({"many": part.state_dict()}, checkpoint_id=dcp_folder))
    return found


class Clock:
    """Measures what all ranks do together."""

    def __init__(self, world: cluster_ddp.World, found: dict[str, list[float]]) -> None:
        self._world, self._found = world, found

    def measure(self, what: str, function: Callable[[], Any]) -> Any:
        """Note the seconds of the slowest rank. Returns what the function returns."""
        self._world.barrier()
        start_s = time.perf_counter()
        result = function()
        self._found.setdefault(what, []).append(self._world.max(time.perf_counter() - start_s))
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    return [one for one in torch.utils._pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]


def _new(world: cluster_ddp.World, folder: Path) -> Path:
    world.barrier()
    if world.is_main:
        shutil.rmtree(folder, ignore_errors=True)
    world.barrier()
    return folder


MEASURED = {"memory": memory, "saves": saves, "many": many}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", choices=MEASURED, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where to write")
    for name, kind in (("rounds", int), ("strategy", str), ("tensors", int), ("width", int)):
        parser.add_argument(f"--{name}", type=kind)
    options = parser.parse_args()
    logging.getLogger("cluster_ddp").setLevel(logging.ERROR)
    torch.manual_seed(0)
    with cluster_ddp.distributed(cuda=False) as world:
        found = MEASURED[options.measure](world, options)
        ranks = world.gather(found)
        world.print(json.dumps({name: max(one[name] for one in ranks) for name in found}))


if __name__ == "__main__":
    main()
