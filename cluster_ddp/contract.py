"""What passes between a submission and the ranks of its job: environment variables, files, record kinds, a status.

`launch` and `runtime` do not import each other. What they share has its name here, once. The templates get this module
as `contract`; the pages docs/reference/environment-variables.md and run-directory.md are tested against it.
"""

from __future__ import annotations

from typing import Final

EXIT_STOPPED: Final = 75
"""Exit status of a training that was stopped in time, with all saved (EX_TEMPFAIL of sysexits.h): requeue the job."""


class Env:
    """Environment variables of a job. The batch script sets them, unless it is said otherwise."""

    RUN_DIR: Final = "CLUSTER_DDP_RUN_DIR"
    """The run directory, absolute. A training writes there. Set it by hand to resume a training without `submit`."""
    RESUME: Final = "CLUSTER_DDP_RESUME"
    """The command that resumes this run, for messages."""
    STOPPED: Final = "CLUSTER_DDP_STOPPED"
    """The stop marker: a file that says that a rank was stopped in time. Launchers may hide its exit status."""
    SECRET: Final = "CLUSTER_DDP_SECRET"
    """What only the ranks of this start of the job have, as hexadecimal digits. Nobody prints or writes it."""
    SHARE: Final = "CLUSTER_DDP_SHARE"
    """1: the group may read the run directory (`--share`)."""
    LOCAL_JOB_ID: Final = "CLUSTER_DDP_LOCAL_JOB_ID"
    """On this machine, without Slurm: the job's id, the process id of its supervisor, which sets it."""
    CPUS_PER_TASK: Final = "CLUSTER_DDP_CPUS_PER_TASK"
    """With `--launcher fork`: the job's SLURM_CPUS_PER_TASK, empty where it had none. The step's own is another."""
    PRELOAD: Final = "CLUSTER_DDP_PRELOAD"
    """Set by you: modules that `--launcher fork` imports before it forks, separated by blanks."""
    DUMMY_GPUS: Final = "CLUSTER_DDP_DUMMY_GPUS"
    """1: the GPUs that Slurm lists do not exist, so ranks compute on the CPU. The sandbox sets it."""


class File:
    """Files of a run directory."""

    SPEC: Final = "spec.json"
    """What was submitted, by which command, when and from where."""
    BATCH_SCRIPT: Final = "job.sbatch"
    """The script that Slurm runs."""
    LOCAL_SCRIPT: Final = "job.sh"
    """The script of a job on this machine."""
    JOB_LOG: Final = "job.log"
    """What the batch script printed, and Slurm about it."""
    TASK_LOG: Final = "task-{}.log"
    """What one task printed, by its number."""
    OUTCOME: Final = "ended.json"
    """How a job on this machine ended. Of others, Slurm knows it."""
    FAILURES: Final = "failures.log"
    """With `--requeue-on-failure`: the newest checkpoint at each failure, one a line."""
    CODE: Final = "code"
    """With `--snapshot`: the copy of the code that the job runs."""
    METRICS: Final = "metrics.jsonl"
    """What the training measured, one record a line."""
    RUN: Final = "run.json"
    """Configuration, ranks, versions and git commit of the training."""
    CHECKPOINTS: Final = "checkpoints"
    """The newest checkpoints."""
    PROGRESS: Final = ".progress"
    """The name of the newest checkpoint."""
    LOCK: Final = ".lock"
    """Held by the training that writes here; one at a time."""
    STOPPED: Final = ".stopped-"
    """The stop marker (`CLUSTER_DDP_STOPPED`) of a start; the number of restarts follows."""


class Record:
    """Kinds of records in metrics.jsonl, their `kind`. Each has also its `time`, in seconds of UNIX time."""

    TRAIN: Final = "train"
    """While it trains: `epoch`, `step`, `loss`, `samples_per_s` over all ranks."""
    TEST: Final = "test"
    """After an evaluation: `epoch`, `loss`, `accuracy` (0 to 1)."""
    TUNE: Final = "tune"
    """Which memory layout was the fastest here: `layout`, `seconds` of each."""
    DONE: Final = "done"
    """The last record of a training that reached its end."""


LATEST: Final = "latest"
"""In the folder of all run directories: a link to the last one that was submitted."""
