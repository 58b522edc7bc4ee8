"""Run a training undisturbed, and again with its ranks killed at a planned point; what they end with must be equal.

def nadam(world: World, point: Point) -> Mapping[str, Any]:
    ...
    point("after", checkpoint.steps)  # in the loop, wherever a rank may be killed
    return {"model": model.state_dict()}  # compared bit for bit

equal_after_kill(nadam, tmp_path, kill=("after", 9))
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ranks import Outcome, job_ids, run_ranks, slurm_step
from torch.utils.data import TensorDataset

import cluster_ddp
from cluster_ddp.runtime.run_dir import background_writer

Point = Callable[[str, int], None]
"""Called with the name of a point in the training and the number of steps: where the plan names it, all ranks die."""
Training = Callable[[cluster_ddp.World, Point], Mapping[str, Any]]

VOLATILE = ("time", "samples_per_s", "waiting_for_data")


def digest(value: Any) -> str:
    """SHA-256 of a nest of containers: each tensor's dtype, strides and bits, the type and value of all else."""
    state = hashlib.sha256()
    _update(state, value)
    return state.hexdigest()


def _update(state: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
        state.update(repr((value.dtype, tuple(value.shape), value.stride())).encode())
        state.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        state.update(repr((value.dtype, value.shape)).encode() + value.tobytes())
    elif isinstance(value, Mapping):
        for key, one in value.items():
            state.update(repr(key).encode())
            _update(state, one)
    elif isinstance(value, (list, tuple)):
        state.update(f"{type(value).__name__} {len(value)}".encode())
        for one in value:
            _update(state, one)
    else:
        state.update(f"{type(value).__name__} {value!r}".encode())


def data(size: int = 96) -> TensorDataset:
    """Rows of 8 numbers, and a class of three."""
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(size, 8, generator=generator), torch.randint(3, (size,), generator=generator))


def net() -> torch.nn.Sequential:
    """A small model for them, with dropout; the same weights each time."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 3))


def generators() -> dict[str, Any]:
    """The state of this process' random number generators."""
    name, keys, *rest = np.random.get_state()
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": (name, keys, *rest)}


def run(training: Training, run_dir: Path, *, ranks: int = 2, kill: tuple[str, int] | None = None) -> list[Outcome]:
    """One start of a training in `run_dir`; with `kill`, rank 0 kills all ranks at this point, after its saves."""
    run_dir.mkdir(parents=True, exist_ok=True)
    logs = run_dir.parent / f"{run_dir.name}-logs-{len(list(run_dir.parent.glob(f'{run_dir.name}-logs-*')))}"
    logs.mkdir()
    env = {"CLUSTER_DDP_RUN_DIR": str(run_dir), "KILL": json.dumps(kill)}
    job_id = job_ids()
    environments = [slurm_step(rank, ranks, job_id=job_id, **env) for rank in range(ranks)]
    return run_ranks(functools.partial(_rank, training), environments, logs)


def _rank(training: Training) -> None:
    kill = json.loads(os.environ["KILL"])
    with cluster_ddp.distributed(cuda=False) as world:
        pids = world.gather(os.getpid())

        def point(name: str, step: int) -> None:
            if kill == [name, step] and world.is_main:
                for files in background_writer._files:
                    files.writer.wait()
                for pid in reversed(pids):
                    os.kill(pid, signal.SIGKILL)
            elif kill == [name, step]:
                signal.pause()

        states = training(world, point)
        found = world.gather({"states": {name: digest(one) for name, one in states.items()}, **_digests()})
        if world.is_main:
            Path(os.environ["CLUSTER_DDP_RUN_DIR"], "end.json").write_text(json.dumps(found))


def _digests() -> dict[str, str]:
    return {name: digest(state) for name, state in generators().items()}


def records(run_dir: Path) -> list[dict[str, Any]]:
    """Of metrics.jsonl, without times, and without the records of times, whose number differs."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [
        {key: value for key, value in record.items() if key not in VOLATILE}
        for record in lines
        if record["kind"] != "steps"
    ]


def succeed(training: Training, run_dir: Path, *, ranks: int = 2) -> list[Outcome]:
    """A start that nobody kills; all ranks must end with status 0."""
    ends = run(training, run_dir, ranks=ranks)
    assert [end.exit_code for end in ends] == [0] * ranks, "\n".join(end.output for end in ends)
    return ends


def equal_after_kill(
    training: Training, folder: Path, *, kill: tuple[str, int] | Sequence[tuple[str, int]], ranks: int = 2
) -> list[Outcome]:
    """Undisturbed and killed at each of these points, one start after the other: the same states, generators, records.

    Returns the ends of the last start.
    """
    kills = [kill] if isinstance(kill[0], str) else list(kill)
    succeed(training, folder / "undisturbed", ranks=ranks)
    for one in kills:
        ends = run(training, folder / "killed", ranks=ranks, kill=one)  # type: ignore[arg-type]
        assert {end.exit_code for end in ends} == {-signal.SIGKILL}, "\n".join(end.output for end in ends)
    ends = succeed(training, folder / "killed", ranks=ranks)
    for name in ("undisturbed", "killed"):
        assert (folder / name / "end.json").exists()
    undisturbed, killed = (json.loads((folder / name / "end.json").read_text()) for name in ("undisturbed", "killed"))
    assert killed == undisturbed
    assert records(folder / "killed") == records(folder / "undisturbed")
    return ends
