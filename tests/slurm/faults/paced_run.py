"""Trainings that are submitted to meet a fault, at a walking pace."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster import Place, label_of, output, records
from slowness import wait_until

from cluster_ddp.slurm import commands, job_status
from cluster_ddp.slurm.job_status import JobStatus

PACED = ("python", str(Path(__file__).with_name("paced_training.py")))
TWO_NODES = ("--nodes", "2", "--gpus-per-node", "1")
# On two nodes, 2 epochs of 20 steps. Its checkpoints have 14 MB.
LARGE = ("--dataset", "digits", "--epochs", "2", "--batch-size", "9", "--checkpoint-every", "6steps")
# 0.4 MB, in a third of the CPU time.
TRAINING = (*LARGE, "--model", "convnet")
VOLATILE = ("time", "samples_per_s", "waiting_for_data")
ONE_TASK = ("--nodes", "1", "--gpus-per-node", "1")
ONE_BASH = (*ONE_TASK, "--launcher", "srun")
"""For a command that is no Python script: such ranks can't be forked."""
TWO_TASKS = ("--nodes", "1", "--gpus-per-node", "2")


@dataclass(frozen=True)
class Run:
    """A submitted training."""

    place: Place
    path: Path

    @property
    def job(self) -> str:
        return label_of(self.path)

    def status(self) -> JobStatus:
        (status,) = job_status.job_statuses(self.job, env=self.place.slurm.env)
        return status

    def metrics(self, folder: Path | None = None) -> list[dict]:
        """The records but those of times, whose number and values differ from run to run."""
        found = [record for record in records(folder or self.path) if record["kind"] != "steps"]
        return [{key: value for key, value in record.items() if key not in VOLATILE} for record in found]

    def nodes(self) -> list[str]:
        return json.loads((self.path / "run.json").read_text())["topology"]["nodes"]

    def wait_for(self, condition: Callable[[], object]) -> None:
        wait_until(condition, said=lambda: f"{self.status()}\n{output(self.path)}", pause_s=0.2)

    def wait_for_step(self, step: int) -> None:
        """Until a checkpoint of this step or a later one is there."""
        folder = self.path / "checkpoints"
        self.wait_for(lambda: any(int(path.stem[5:]) >= step for path in folder.glob("step-*.pt")))

    def release(self) -> None:
        """End the wait of a training that is `held`."""
        (self.path / "go").touch()

    def end(self) -> JobStatus:
        return self.place.end_of(self.path)

    def completed(self, *, restarts: int | None = None) -> str:
        status, said = self.end(), output(self.path)
        assert status.state == "COMPLETED", f"{status}\n{said}"
        assert restarts in (None, status.restarts), said
        return said

    def failed(self) -> str:
        status, said = self.end(), output(self.path)
        assert status.state == "FAILED", f"{status}\n{said}"
        assert status.restarts == 0
        return said

    def slurm(self, *command: str) -> None:
        commands.run(command, env=self.place.slurm.env)


Started = dict[str, Run]


def held(step: int, *, start: int = 0) -> dict[str, object]:
    """Return an entry of FAULTS: in this start of the job, rank 0 waits at this step for a stop or `Run.release`."""
    return {"do": "wait", "rank": 0, "step": step, "start": start}


def start(
    place: Place,
    *submission: str,
    training: tuple[str, ...] = TRAINING,
    run_dir: Path | None = None,
    command: tuple[str, ...] = PACED,
    nodes: tuple[str, ...] = TWO_NODES,
    pace_s: float = 0.1,
    **env: object,
) -> Run:
    """Submit a paced training; `env` becomes environment variables, in JSON unless they are texts."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in env.items()}
    words = ["env", f"PACE_S={pace_s}", *(f"{key}={value}" for key, value in texts.items()), *command, *training]
    if run_dir is not None:
        words += ["--run-dir", str(run_dir)]
    return Run(place, place.start(*nodes, *submission, "--", *words))
