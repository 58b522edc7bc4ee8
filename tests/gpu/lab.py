"""What a test is given: it runs trainings, notes figures, and says what only a GPU can show."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import ROOT, Ended, local, python, through_srun

sys.path.insert(0, str(ROOT / "benchmarks"))
from record import Figure  # standard library only

KILL_WAIT_S = 30.0
"""Slurm's KillWait by default: what is not gone by then is killed, whatever it was saving."""
LIMIT_S = 600.0
"""For one test, and for what it starts: for hangs only."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training that has ended, well or not."""

    folder: Path
    """The run directory."""
    ended: Ended
    script_result: Mapping[str, Any]
    """What the script of rank 0 has written in the end; empty where it did not come so far."""

    @property
    def statuses(self) -> list[int | None]:
        """Exit statuses of the ranks; through srun, its own alone."""
        return self.ended.statuses

    @property
    def text(self) -> str:
        """The output of all ranks."""
        return "\n".join(self.ended.outputs)

    @property
    def after_fault_s(self) -> float:
        """Seconds from the injected fault to the end of the last rank."""
        assert (self.folder / "fault").exists(), f"ended before the injected fault:\n{self.text}"
        return self.ended.ended_at - float((self.folder / "fault").read_text())

    def records(self, kind: str) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl of a kind: "train", "test", "done"."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]

    @property
    def losses(self) -> list[float]:
        """The mean loss of all ranks, line by line."""
        return [record["loss"] for record in self.records("train")]

    @property
    def weights(self) -> str:
        """The SHA-256 of the weights. The training has compared it over all ranks."""
        return str(self.records("done")[-1]["weights_sha256"])

    @property
    def samples_per_s(self) -> float:
        """The median over the log lines of the second half."""
        rates = [record["samples_per_s"] for record in self.records("train")]
        return statistics.median(rates[len(rates) // 2 :])


@dataclass(kw_only=True)
class Lab:
    """One group's tests share it."""

    folder: Path
    """For runs; on a file system that all ranks see."""
    rehearse: bool
    """On the CPU with gloo, with stand-ins for CUDA graphs."""
    world_size: int = 1
    shares_gpu: bool = False
    """Whether all ranks compute on the first GPU."""
    srun: Sequence[str] | None = None
    """Arguments for srun; None starts the ranks here."""
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What the test that runs has left out."""
    about: dict[str, Any] = field(default_factory=dict)
    """Device and versions, as the first training found them."""
    _runs: dict[str, Run] = field(default_factory=dict)
    _count: int = 0

    @property
    def last_rank(self) -> int:
        """The one to which things happen: on another node than rank 0, if there are several."""
        return self.world_size - 1

    def figure(self, what: str, *values: float, unit: str, **more: Any) -> None:
        """Note what was measured, for the benchmarks."""
        self.figures.append(Figure(what=what, values=values, unit=unit, **more))

    def on_gpu(self, what: str) -> bool:
        """Whether something can be shown that only a GPU shows; in a rehearsal a note says what was left out."""
        if self.rehearse:
            self.notes.append(f"SKIPPED: only on a GPU: {what}")
        return not self.rehearse

    def is_gone_within(self, seconds: float, run: Run) -> None:
        """Check how long all ranks took from the fault to their end. A rehearsal may wait for a CPU: it only ends."""
        if not self.rehearse:
            assert run.after_fault_s < seconds, f"gone after {run.after_fault_s:.1f} s:\n{run.text}"

    def epochs(self, number: int) -> int:
        """Of a training that comes to its end: two are enough for a rehearsal."""
        return min(number, 2) if self.rehearse else number

    def new_folder(self) -> Path:
        """One that is not there yet."""
        self._count += 1
        return self.folder / f"run-{self._count}"

    def trained(self, *, options: Mapping[str, Any] | None = None, **config: Any) -> Run:
        """A whole training that ended well; one that was made before is not made again."""
        key = json.dumps([options, config], sort_keys=True)
        if key not in self._runs:
            run = self.train(options=options, **config)
            assert set(run.statuses) == {0}, f"exit statuses {run.statuses}:\n{run.text}"
            self._runs[key] = run
        return self._runs[key]

    def train(
        self,
        *,
        folder: Path | None = None,
        options: Mapping[str, Any] | None = None,
        hangs: Collection[int] = (),
        launcher: Sequence[str] = (),
        **config: Any,
    ) -> Run:
        """Train the digits.

        Args:
            folder: the run directory; default: a new one.
            options: of scripts/train.py.
            hangs: ranks that won't end by themselves.
            launcher: replaces the command up to the script, such as the fork launcher.
            config: of TrainConfig.
        """
        folder = folder or self.new_folder()
        folder.mkdir(parents=True, exist_ok=True)
        given = {
            "rehearse": self.rehearse,
            "shared_gpu": self.shares_gpu,
            **(options or {}),
            "config": {
                "dataset": "digits",
                "run_dir": str(folder),
                "checkpoint_every": "never",
                **({"model": "convnet"} if self.rehearse else {}),  # a third of the CPU time
                **config,
            },
        }
        task = folder / "task.json"
        task.write_text(json.dumps(given))
        (folder / "result.json").unlink(missing_ok=True)
        ended = self.start(folder, python("train.py", str(task)), hangs=hangs, launcher=launcher)
        result = folder / "result.json"
        run = Run(folder=folder, ended=ended, script_result=json.loads(result.read_text()) if result.exists() else {})
        self.about = self.about or run.script_result.get("about", {})
        return run

    def start(
        self,
        folder: Path,
        command: list[str],
        *,
        hangs: Collection[int] = (),
        launcher: Sequence[str] = (),
    ) -> Ended:
        """Run a Python script as all ranks, as this group starts them.

        Raises:
            AssertionError: they did not end in time; with what they wrote.
        """
        env = self._environment()
        command = [command[0], *launcher, *command[1:]]
        if self.srun is not None:
            ended = through_srun(self.srun, command, folder, timeout_s=LIMIT_S, env=env)
        else:
            ended = local(command, self.world_size, folder, timeout_s=LIMIT_S, env=env, hangs=hangs)
        assert not ended.timed_out, f"not ended after {LIMIT_S:g} s:\n" + "\n".join(ended.outputs)
        return ended

    def _environment(self) -> dict[str, str]:
        if self.rehearse:
            return {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        if self.shares_gpu:
            # Both ranks' kernels must find room on the GPU at the same time (NCCL 2.30, env.rst): few blocks of each.
            return {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}
        return {}


def difference(one: Run, other: Run) -> str:
    """For a message: how far two trainings are from each other."""
    pairs = list(zip(one.losses, other.losses))
    greatest = max((abs(a - b) for a, b in pairs), default=float("nan"))
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    return f"other weights; of {len(pairs)} losses the first to differ is {first}, by at most {greatest:g}"
