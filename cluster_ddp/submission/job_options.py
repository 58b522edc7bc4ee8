"""The options of a job, each defined once: the fields of `JobSpec`, beside those of its ranks.

Texts have sbatch(1)'s own syntax, without what a shell or an #SBATCH line interprets: blanks, quotes, '$', '`', '\\\\',
'#', line breaks. Paths, images and environments may have most of these, since the templates quote them. So may the
description, which stands in a comment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster_ddp.agent.launch_options import PATH, SIZE, RankOptions, passed_on
from cluster_ddp.option_form import option

DAYS = ("today", "tomorrow", "midnight", "noon", "teatime", "fika", "elevenses")
"""Words for the time of `begin`."""

_DEPENDENCY = r"(singleton|(after|afterany|afterok|afternotok|aftercorr|afterburstbuffer|expand):[\w:+]+)"
_THE_CLUSTERS = "the cluster's"


@dataclass(frozen=True, kw_only=True)
class JobOptions(RankOptions):
    """What to run, and on which nodes and GPUs. None leaves a setting to the cluster's default."""

    name: str = option(
        "", pattern=r"[\w.+@=-]{1,128}", legal="letters, digits and . _ + - @ =", names=("-J", "--job-name")
    )
    """Name of the job, as squeue shows it."""
    description: str = option("", pattern=r"[^\x00-\x1f\x7f]*", legal="one line")
    """One line for the script's header."""
    nodes: int = option(
        1,
        least=1,
        names=("-N",),
        metavar="N|MIN-MAX",
        hint="for two nodes: --nodes 2; for two to eight: --nodes 2-8; in Python: nodes=2, max_nodes=8",
    )
    """Number of nodes, or a range such as 2-8: on Slurm, the job takes what is free (in Python: `max_nodes`)."""
    max_nodes: int | None = None
    """Upper end of a range of nodes: the job starts with any number from `nodes` on. `restarts` continue with fewer."""
    gpus_per_node: int = option(1, least=1, hint="for four ranks on each node: --gpus-per-node 4")
    """Number of GPUs on each node, and of ranks, unless gpus_per_task is more than 1."""
    gpu_type: str | None = option(
        None,
        pattern=r"[\w.-]+",
        legal="a type that sinfo -o %G shows, such as a100",
        hint="see the types: sinfo -o %G",
    )
    """Type of GPU, such as a100; sinfo -o %G shows the types."""
    cpus_per_task: int | None = option(
        None, names=("-c",), by_default=_THE_CLUSTERS, hint="for eight CPUs a rank: --cpus-per-task 8"
    )
    """Number of CPUs for each rank."""
    mem: str | None = option(None, **SIZE, by_default=_THE_CLUSTERS, hint="for 32 GiB: --mem 32G")
    """Memory per node, such as 32G."""
    time: str | None = option(None, names=("-t",), by_default=_THE_CLUSTERS, hint="for one hour: --time 1:00:00")
    """Time limit: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S or UNLIMITED. Kept as D-HH:MM:SS."""
    partition: str | None = option(
        None,
        pattern=r"[\w.+@-]+(,[\w.+@-]+)*",
        legal="names that sinfo shows, separated by commas",
        names=("-p",),
        by_default=_THE_CLUSTERS,
        hint="see the names: sinfo -o %P",
    )
    """Partition, or several separated by commas: Slurm uses the one that starts the job first."""
    account: str | None = option(
        None,
        pattern=r"[\w.+@/-]+",
        legal="a name that sacctmgr show associations shows",
        names=("-A",),
        by_default=_THE_CLUSTERS,
        hint="see yours: sacctmgr show associations user=$USER",
    )
    """Slurm account to charge."""
    qos: str | None = option(
        None,
        pattern=r"[\w.+@-]+",
        legal="a name that sacctmgr show qos shows",
        names=("-q",),
        by_default=_THE_CLUSTERS,
        hint="see yours: sacctmgr show associations user=$USER format=qos",
    )
    """Quality of service (QOS)."""
    constraint: str | None = option(
        None,
        pattern=r"[\w.+@=:&|!*,()\[\]-]+",
        legal="features that sinfo -o %f shows, such as a100&nvlink",
        names=("-C",),
        hint="see the features: sinfo -o %f",
    )
    """Features that the nodes must have."""
    exclude: str | None = option(
        None,
        pattern=r"[\w.,\[\]-]+",
        legal="nodes that sinfo -N shows, such as node[3-4]",
        names=("-x",),
        hint="see the names: sinfo -N",
    )
    """Nodes that the job must not get, such as node3,node[7-8]."""
    array: str | None = option(
        None,
        pattern=r"{0}(,{0})*(%[1-9]\d{{0,17}})?".format(r"\d{1,18}(-\d{1,18}(:[1-9]\d{0,17})?)?"),
        legal="task numbers such as 0-7, 1,3,5 or 0-99%4",
        hint="for eight tasks: --array 0-7",
    )
    """Task numbers of a job array, such as 0-7 or 0-99%4 (four at a time)."""
    grid: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Values of each placeholder of the command. Array task i runs combination i."""
    pack: int | None = option(None, needs={"array": "0-9999"})
    """Run an array's tasks in few jobs, so many of them at a time in each job. The resources are then a task's."""
    jobs: int | None = option(None, needs={"pack": 4})
    """With `pack`: number of jobs that the tasks are divided into (default: 1)."""
    begin: str | None = option(
        None,
        pattern=r"\d[\w:./-]*|now([+-]\d+[a-z]*)?|" + "|".join(DAYS),
        legal="a time such as 16:00, tomorrow, now+2hours or 2030-01-31T12:00",
        hint="in two hours: --begin now+2hours",
    )
    """Earliest start, in the form of sbatch's --begin, such as 16:00 or now+2hours."""
    after: str | None = option(
        None,
        pattern=r"{0}(:{0})*|{1}([,?]{1})*".format(r"\d+(_\d+)?", _DEPENDENCY),
        legal="a job id, such as 12, or a dependency, afterany:12",
        names=("-d", "--dependency"),
        hint="after job 12 has succeeded: --after 12; whatever became of it: --after afterany:12",
    )
    """Id of a job that must succeed first, or a dependency for sbatch, such as afterany:12."""
    signal: str | None = option(
        None,
        pattern=r"(R:)?[A-Z0-9]+(@\d+)?",
        legal="a signal and seconds before the end, such as USR1@120 (not B:…, which would end the batch script)",
        hint="two minutes before the end: --signal USR1@120",
    )
    """Signal to send before the time limit, such as USR1@120: two minutes before."""
    requeue: bool | None = option(None, by_default=_THE_CLUSTERS)
    """Let Slurm requeue the job after preemption or the loss of a node."""
    modules: tuple[str, ...] = option(
        (),
        pattern=r"[\w.+/][\w.+/-]*",
        legal="names that module avail shows, such as cuda/12.8",
        hint="see the names: module avail",
    )
    """Environment modules to load before the ranks start."""
    venv: str | None = option(None, **PATH)
    """Virtual environment to activate."""
    conda_env: str | None = option(None, pattern=PATH["pattern"], legal="a name or path without line breaks")
    """Conda environment to activate."""
    stage_env: bool = False
    """Pack the virtual environment into one file; each node unpacks it to $SLURM_TMPDIR or /tmp before ranks start."""
    setup: tuple[str, ...] = option((), pattern=r"[^\x00]*", legal="lines of bash")
    """Lines of bash to run before the ranks start. They run unchecked: never put text from others here."""
    template: str | None = option(None, **PATH)
    """Jinja template of your site for the batch script; it extends ours (submit --show-template)."""
    sbatch_options: tuple[str, ...] = option((), **passed_on("--sbatch-options", "--reservation=course"))
    """More options for sbatch, such as --reservation=course."""
