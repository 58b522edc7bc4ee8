"""What a submission and the ranks of its job share: environment variables, files, record kinds, an exit status.

`submission` and `runtime` do not import each other. Each shared name is defined here, once. Tests compare
docs/reference/environment-variables.md and run-directory.md with it.
"""

from __future__ import annotations

from typing import Final

EXIT_STOPPED: Final = 75
"""Exit status of a training that stopped in time and has a checkpoint (EX_TEMPFAIL of sysexits.h): requeue the job."""

RECORDS_VERSION: Final = 1
"""Version of the records in starts.jsonl, metrics.jsonl and usage-N.jsonl; a field with a new meaning raises it."""

RESTART: Final = "Restart "
"""So begins a line of a job's log with which the batch script begins, if the job was started before."""

SEED: Final = "seed"
"""What ps and top show of the process that forks ranks, in the place of its program."""

RESUME: Final = "cluster-ddp submit --resume"
"""The command that resumes a run, up to the run directory."""

TO_RESUME: Final = "To resume: "
"""So begins the line with the command that resumes a run: in the job's log, and what `--watch` and `logs -f` print."""


class Env:
    """Environment variables of a job. Its batch script or its agent sets them unless stated otherwise."""

    RUN_DIR: Final = "CLUSTER_DDP_RUN_DIR"
    """The run directory, absolute. A training writes there. Set it by hand to resume a training without `submit`."""
    PLACE_IN_JOB: Final = "CLUSTER_DDP_PLACE_IN_JOB"
    """In a task that shares its job of Slurm with others: its place among them, from 1 on."""
    SLURM_RESTARTS: Final = "CLUSTER_DDP_SLURM_RESTARTS"
    """Number of Slurm's requeues of the job, where SLURM_RESTART_COUNT counts more than those."""
    RESUME: Final = "CLUSTER_DDP_RESUME"
    """The command that resumes this run, for messages."""
    NOTES: Final = "CLUSTER_DDP_NOTES"
    """Folder on the node where a rank notes why it failed, that it was stopped in time, or that it has joined."""
    STACKS: Final = "CLUSTER_DDP_STACKS"
    """Folder of a job on this machine where the ranks leave their stacks until they have a run directory."""
    AGENT: Final = "CLUSTER_DDP_AGENT"
    """Process id of the agent around a rank, and when it was started: the rank ends with it, also if it is killed."""
    CHANNEL: Final = "CLUSTER_DDP_CHANNEL"
    """HOST:PORT of the job's agent, which the agents around the ranks tell how each rank ended."""
    JOB_TIMES: Final = "CLUSTER_DDP_JOB_TIMES"
    """Path of a file with the job's start and end in seconds of UNIX time, as squeue said at most a minute ago."""
    SECRET: Final = "CLUSTER_DDP_SECRET"
    """Secret of the job's ranks, in hexadecimal digits; a requeue has another. Never printed or written to a file."""
    SHARE: Final = "CLUSTER_DDP_SHARE"
    """1: the group may read the run directory (`--share`)."""
    START: Final = "CLUSTER_DDP_START"
    """Number of starts of the job's ranks before this one: restarts in the allocation and requeues. 0 at first."""
    START_ID: Final = "CLUSTER_DDP_START_ID"
    """Which start of its ranks this is, of all in the run directory: a number that no other start has."""
    CHAIN: Final = "CLUSTER_DDP_CHAIN"
    """In a chain of jobs (`--chain`): the id of its array. For the run directory, they are one job of this id."""
    MICRO_BATCH: Final = "CLUSTER_DDP_MICRO_BATCH"
    """Most samples of a rank in one batch of an update (`global_batch`): GPU memory was too small for more."""
    HANG_RESTART_S: Final = "CLUSTER_DDP_HANG_RESTART_S"
    """Seconds after the warning of a hang until ranks that do not answer end the start (`--hang-restart-s`)."""
    LOCAL_JOB_ID: Final = "CLUSTER_DDP_LOCAL_JOB_ID"
    """Set by the supervisor of a job on this machine, without Slurm: the job's id, which is its process id."""
    CPUS_PER_TASK: Final = "CLUSTER_DDP_CPUS_PER_TASK"
    """With `--launcher fork`: the job's SLURM_CPUS_PER_TASK, empty if unset. The step's value differs."""
    GPUS_PER_TASK: Final = "CLUSTER_DDP_GPUS_PER_TASK"
    """Number of GPUs that each rank drives, if it is more than one (`--gpus-per-task`)."""
    TRACK: Final = "CLUSTER_DDP_TRACK"
    """Names of the trackers, separated by spaces (`--track`). Without `submit`, set it by hand."""
    COPY: Final = "CLUSTER_DDP_COPY"
    """With `--stage-env`: the name of the environment's copy on each node, up to the node's number."""
    PRELOAD: Final = "CLUSTER_DDP_PRELOAD"
    """Set by you: modules that `--launcher fork` imports before it forks, separated by spaces."""
    DUMMY_GPUS: Final = "CLUSTER_DDP_DUMMY_GPUS"
    """1: the GPUs that Slurm lists do not exist, so ranks compute on the CPU. The sandbox sets it."""


OF_A_JOB: Final = frozenset(
    [
        *(Env.RUN_DIR, Env.RESUME, Env.NOTES, Env.STACKS, Env.AGENT, Env.CHANNEL, Env.JOB_TIMES, Env.SECRET, Env.SHARE),
        *(Env.LOCAL_JOB_ID, Env.START, Env.START_ID, Env.CHAIN, Env.PLACE_IN_JOB, Env.SLURM_RESTARTS),
        *(Env.HANG_RESTART_S, Env.MICRO_BATCH, Env.CPUS_PER_TASK, Env.GPUS_PER_TASK, Env.TRACK, Env.COPY),
    ]
)
"""Variables that a job sets for its ranks. A job that is submitted or started in one of them takes none of these."""


class File:
    """Files of a run directory."""

    SPEC: Final = "spec.json"
    """The submission: job specification, command, time and working directory."""
    JOB: Final = "job.json"
    """The job's id, its cluster, and by when it was submitted; for an array's task, from its start on."""
    FUNCTION: Final = "function.pkl"
    """The submitted function, if the job runs no command."""
    BATCH_SCRIPT: Final = "job.sbatch"
    """The script that Slurm runs."""
    LOCAL_SCRIPT: Final = "job.sh"
    """The script of a job on this machine."""
    AGENT: Final = "agent.pyz"
    """The agent that starts the ranks, as it was at the submission; for an array, in the folder of the whole."""
    JOB_LOG: Final = "job.log"
    """Output of the batch script, with Slurm's messages."""
    HOLDER_LOG: Final = "pack-{}.log"
    """In the folder of a whole array: output of a job that holds several of its tasks; {} is its number."""
    TASK_LOG: Final = "task-{}.log"
    """Output of one task; {} is its number."""
    CANCEL: Final = "cancel"
    """`cluster-ddp cancel` makes this file, and the agent of a task that shares its job ends the task."""
    JOURNAL: Final = "job.jsonl"
    """What the jobs of the run had, how the starts of their ranks ended, what followed: see `run.journal`."""
    SICK_NODES: Final = "sick-nodes.txt"
    """Nodes that were found at fault in this job: one per line, then why. With `--restarts`, they are left out."""
    CODE: Final = "code"
    """With `--snapshot`: the copy of the code that the job runs."""
    METRICS: Final = "metrics.jsonl"
    """Measurements of the training, one record per line."""
    STARTS: Final = "starts.jsonl"
    """Each start of the training and its end: from which step, why it ended, what was lost. It is never cut back."""
    RUN: Final = "run.json"
    """Configuration, ranks, versions and git commit of the training."""
    USAGE: Final = "usage-{}.jsonl"
    """How a node was used: CPUs, memory, GPUs, network; one record for every ten seconds. {} is the node's number."""
    STACK: Final = "stack-rank{}.txt"
    """Where a rank was in a hang: one line of JSON, then its Python stacks; {} is its number."""
    HANG: Final = "hang.txt"
    """Where all ranks were in the last hang, in words."""
    TRACKERS: Final = "trackers"
    """With `--track`: a folder for each tracker, and `id`, the id that the run has in each of its starts."""
    CHECKPOINTS: Final = "checkpoints"
    """The newest checkpoints."""
    PROGRESS: Final = ".progress"
    """The name of the newest checkpoint."""
    START: Final = ".start"
    """The job and the start that own the run directory. Ranks of an older start can no longer write."""
    LOCK: Final = ".lock"
    """Lock file: one training at a time writes to the run directory. While one that has ended waits for room on a full
    disk, the file's time of modification is when it gives up."""


TRACKERS: Final = ("tensorboard", "wandb", "mlflow")
"""Legal names of `--track`: each is a library's module and an extra of this package."""

GLOBAL_STEP: Final = "global_step"
"""Field of each record of metrics.jsonl in a training with a `Checkpointer`: steps done since the training began."""


OF_FIRST_RECORD: Final = ("version", "restart")
"""Fields of the first record of each start in metrics.jsonl, in a training without a `Checkpointer`: `RECORDS_VERSION`,
and the number of starts before (`Env.START`). With one, starts.jsonl has them."""


class Record:
    """Values of `kind` of the records in metrics.jsonl. Each record also has its `time`, in seconds of UNIX time."""

    TRAIN: Final = "train"
    """During training: `epoch`, `step`, `samples`, `lr`, `loss` (if finite), `samples_per_s` of all ranks,
    `waiting_for_data`: the part of the time that rank 0 waited for batches, 0 to 1."""
    TEST: Final = "test"
    """After an evaluation: `epoch`, `loss`, `accuracy` (0 to 1), `correct`, `samples`.
    With `--eval-only`: `weights`, the checkpoint's path, instead of `epoch`."""
    STEPS: Final = "steps"
    """Where the time of the steps went, about every ten seconds: `restart`, the number of starts before; `progress`,
    the part of the training that is done, 0 to 1; `steps`, the number of steps measured; `step_s`, the mean seconds of
    a step on rank 0, and its parts `data_s`, `compute_s`, `communication_s` (that backward does not hide),
    `optimizer_s` (not on GPUs) and `checkpoint_s`; `rank_s_min` and `rank_s_max`: over the ranks, the seconds of
    a step without communication; `slowest_rank`; `samples_per_s` and `samples_per_s_per_rank`."""
    DONE: Final = "done"
    """The last record of a training that reached its end: `weights_sha256`."""


class Then:
    """Values of `then` of the ends in job.jsonl: what followed a start."""

    RESTART: Final = "restart"
    """The ranks started again in the allocation."""
    REQUEUE: Final = "requeue"
    """The job was requeued; in a chain, its next job follows."""
    END: Final = "end"
    """The job ended."""


class Kind:
    """Kinds of failure: what follows one depends on it. Empty if it is not known."""

    PROGRAM: Final = "program"
    """An exception of the program: it comes on any node."""
    GPU_MEMORY: Final = "GPU memory"
    """Too little memory of a GPU, which is the program's as well."""
    HOST_MEMORY: Final = "host memory"
    """The kernel has killed a process for memory."""
    GPU_HARDWARE: Final = "GPU hardware"
    """A GPU that is broken or lost: its node is left out at once."""
    GPU: Final = "GPU"
    """A GPU, its driver or NCCL, or the program."""
    SYSTEM: Final = "system"
    """What the node refused, such as a file."""
    COMMUNICATION: Final = "communication"
    """A connection, not surely that to another rank."""
    PEER: Final = "peer"
    """Another rank has failed, or is gone."""
    SAW_PEERS: Final = "saw peers"
    """The same, of a rank that says where all ranks were then."""
    HANG: Final = "hang"
    """Other ranks did not answer: the node of the one that says so is not to blame."""
    KILLED: Final = "killed"
    """A signal ended it, and nothing is known of the cause."""
    NODE: Final = "node"
    """The node, or the agent there, is lost or at fault."""


ASIDE: Final = "job-{}"
"""Folder in a run directory for the files of an earlier job, which was resumed; {} is its id."""

ENDS: Final = ("COMPLETED", "STOPPED")
"""Values of `state` of the "end" records in starts.jsonl: how this start of a training ended. STOPPED is stopped in
time, with a checkpoint. A failure is in job.jsonl."""


LATEST: Final = "latest"
"""A link beside the run directories, to the last one submitted."""
