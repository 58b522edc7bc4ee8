"""A job as data, checked before anything is rendered or submitted.

One rank drives one GPU, or `gpus_per_task`. So no field sets the number of tasks: it follows from the number of GPUs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from cluster_ddp.errors import SpecError, counted, nearest, nearest_name
from cluster_ddp.run.names import TRACKERS
from cluster_ddp.submission import grids, spec_rules
from cluster_ddp.submission.pack import rules as pack_rules
from cluster_ddp.submission.validation import check_field, field_error, normalized_time

Launcher = Literal["srun", "fork"]


def _needs(default: Any, **others: Any) -> Any:
    """Return a field with a default that is legal beside other fields only, such as these: so it is checked alone."""
    return field(default=default, metadata=others)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """What to run, and on which nodes and GPUs. None leaves a setting to the cluster's default.

    Raises:
        SpecError: a field has an illegal value, or contradicts another field. The error names the field.
    """

    name: str
    """Name of the job, as squeue shows it."""
    command: tuple[str, ...] = ()
    """Command of every task, one item per word; each is quoted for the shell. In an array, "{array_task_id}" becomes
    the task's number, and "{key}" the task's value of this key of the grid."""
    description: str = ""
    """One line for the script's header."""
    nodes: int = 1
    """Number of nodes, or a range such as 2-8: on Slurm, the job takes what is free (in Python: `max_nodes`)."""
    max_nodes: int | None = None
    """Upper end of a range of nodes: the job starts with any number from `nodes` on. `restarts` continue with fewer."""
    gpus_per_node: int = 1
    """Number of GPUs on each node, and of ranks, unless gpus_per_task is more than 1."""
    gpus_per_task: int = 1
    """Number of GPUs that each rank drives, for a model over several: `distributed(gpus_per_task=…)`."""
    gpu_type: str | None = None
    """Type of GPU, such as a100; sinfo -o %G shows the types."""
    cpus_per_task: int | None = None
    """Number of CPUs for each rank."""
    mem: str | None = None
    """Memory per node, such as 32G."""
    time: str | None = None
    """Time limit: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S or UNLIMITED. Kept as D-HH:MM:SS."""
    partition: str | None = None
    """Partition, or several separated by commas: Slurm uses the one that starts the job first."""
    account: str | None = None
    """Slurm account to charge."""
    qos: str | None = None
    """Quality of service (QOS)."""
    constraint: str | None = None
    """Features that the nodes must have."""
    exclude: str | None = None
    """Nodes that the job must not get, such as node3,node[7-8]."""
    array: str | None = None
    """Task numbers of a job array, such as 0-7 or 0-99%4 (four at a time)."""
    grid: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Values of each placeholder of the command. Array task i runs combination i."""
    pack: int | None = _needs(None, array="0-9999")
    """Run an array's tasks in few jobs, so many of them at a time in each job. The resources are then a task's."""
    jobs: int | None = _needs(None, pack=1, array="0-9999")
    """With `pack`: number of jobs that the tasks are divided into (default: 1)."""
    begin: str | None = None
    """Earliest start, in the form of sbatch's --begin, such as 16:00 or now+2hours."""
    after: str | None = None
    """Id of a job that must succeed first, or a dependency for sbatch, such as afterany:12."""
    signal: str | None = None
    """Signal to send before the time limit, such as USR1@120: two minutes before."""
    requeue: bool | None = None
    """Let Slurm requeue the job after preemption or the loss of a node."""
    chain: bool = False
    """Where requeues are forbidden: continue in a next job, with the same run directory. It counts as a requeue. The
    jobs are an array of `max_requeues` + 1 tasks, which Slurm runs one after the other."""
    max_requeues: int = 20
    """Requeue a job that was stopped in time (exit status 75), unless it has restarted this often already."""
    restarts: int = 0
    """How often to start the ranks again after a failure, from the newest checkpoint: in the job's allocation, without
    a node that is lost or at fault, else by a requeue. Four failures without a new checkpoint end the job."""
    spare_nodes: int = _needs(0, restarts=1)
    """On Slurm: how many nodes to ask for beside `nodes`. They wait idle, until another node is lost or at fault. It
    needs `restarts`."""
    hang_restart_s: int = _needs(0, restarts=1)
    """Seconds after the warning of a hang (--hang-warning-s) until all ranks start again without a node that does not
    answer. It needs `restarts`. 0: not before the collective timeout."""
    restart_args: str = ""
    """Words to add to the command from its second start on, quoted as for a shell, such as "--resume last.pth"."""
    launcher: Launcher = "srun"
    """srun: one task per rank. fork: one task per node; it imports torch once and forks the ranks; for Python scripts
    and modules."""
    modules: tuple[str, ...] = ()
    """Environment modules to load before the ranks start."""
    venv: str | None = None
    """Virtual environment to activate."""
    conda_env: str | None = None
    """Conda environment to activate."""
    stage_env: bool = False
    """Pack the virtual environment into one file; each node unpacks it to $SLURM_TMPDIR or /tmp before ranks start."""
    doctor: bool = False
    """Examine the nodes before the ranks start (cluster-ddp doctor --quick); a problem ends the job with a verdict."""
    setup: tuple[str, ...] = ()
    """Lines of bash to run before the ranks start. They run unchecked: never put text from others here."""
    container: str | None = None
    """Container image for Apptainer or Singularity: a .sif file or a URI such as docker://…"""
    container_image: str | None = None
    """Container image for Pyxis and Enroot."""
    container_binds: tuple[str, ...] = _needs((), container="image.sif")
    """More folders for the container, as PATH or SOURCE:DESTINATION. It always has the working and run directories."""
    container_overlays: tuple[str, ...] = _needs((), container="image.sif")
    """Overlays of an Apptainer container, mounted read-only."""
    track: tuple[str, ...] = ()
    """Trackers that get the run's metrics: tensorboard, wandb, mlflow. They write files in the run directory."""
    template: str | None = None
    """Jinja template of your site for the batch script; it extends ours (submit --show-template)."""
    share: bool = False
    """Let your group read the run directory. By default, only you can."""
    sbatch_options: tuple[str, ...] = ()
    """More options for sbatch, such as --reservation=course."""
    srun_options: tuple[str, ...] = ()
    """More options for srun, which starts the ranks, such as --cpu-bind=verbose."""

    def __post_init__(self) -> None:
        for one in fields(self):
            check_field(one.name, str(one.type), getattr(self, one.name))
        if self.max_nodes == self.nodes:
            object.__setattr__(self, "max_nodes", None)
        if self.time is not None:
            object.__setattr__(self, "time", normalized_time(self.time))
        if self.command[:1] == ("",) or any("\0" in argument for argument in self.command):
            hint = "name a program first"
            raise field_error("command", self.command, "a program and its arguments, without NUL bytes", hint=hint)
        self._check_names()
        spec_rules.check(self)
        object.__setattr__(self, "array", grids.checked_array(self.array, self.grid))
        pack_rules.check(self, tasks=0 if self.array is None else grids.count(self.array))
        if self.command:
            grids.check_placeholders(self.command, self.grid, array=self.array)

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on each node."""
        return self.gpus_per_node // self.gpus_per_task

    @property
    def node_range(self) -> str:
        """The number of nodes as --nodes takes it: 2, or 2-8."""
        return str(self.nodes) if self.max_nodes is None else f"{self.nodes}-{self.max_nodes}"

    @property
    def world_size(self) -> int:
        """Number of ranks; of a range of nodes, the smallest."""
        return self.nodes * self.ranks_per_node

    @property
    def all_nodes(self) -> int:
        """Number of nodes that the job asks for: those that it trains on, and the spare ones."""
        return self.nodes + self.spare_nodes

    @property
    def size(self) -> str:
        """What each of its tasks has, in words."""
        if self.pack is not None:
            gpus, jobs = counted(self.gpus_per_node, "GPU"), counted(self.jobs or 1, "job")
            return f"{gpus}, in {jobs} of {self.pack} at a time"
        nodes = counted(self.nodes, "node") if self.max_nodes is None else f"{self.node_range} nodes"
        return f"{nodes} x {counted(self.gpus_per_node, 'GPU')}{f', and {self.spares}' if self.spares else ''}"

    @property
    def spares(self) -> str:
        """What its spare nodes cost, in words; empty without any."""
        spares, gpus = counted(self.spare_nodes, "spare node"), self.spare_nodes * self.gpus_per_node
        whose, wait = "its" if self.spare_nodes == 1 else "their", "waits" if gpus == 1 else "wait"
        return f"{spares} of {self.all_nodes}: {whose} {counted(gpus, 'GPU')} {wait} idle" if self.spare_nodes else ""

    def _check_names(self) -> None:
        if self.launcher not in (names := get_args(Launcher)):
            meant = nearest_name(str(self.launcher), names)
            raise field_error("launcher", self.launcher, f"one of {', '.join(names)}", meant=meant)
        for tracker in self.track:
            if tracker not in TRACKERS:
                found = f"there is no such tracker.{nearest(tracker, TRACKERS)}"
                raise SpecError(f"Tracking with {tracker!r}:", found, f"the trackers are {', '.join(TRACKERS)}")


def of_task(spec: JobSpec) -> JobSpec:
    """Return the specification of an array's task, which resumes as a single job."""
    return derived(spec, array=None, grid={}, pack=None, jobs=None)


def derived(spec: JobSpec, **values: Any) -> JobSpec:
    """Return a specification with other values of some fields. They follow from checked ones, and are not checked."""
    made = copy.copy(spec)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made
