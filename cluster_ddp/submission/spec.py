"""A job as data, checked before anything is rendered or submitted.

One rank drives one GPU, or `gpus_per_task`. So no field sets the number of tasks: it follows from the number of GPUs.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from cluster_ddp.errors import counted
from cluster_ddp.submission import grids, spec_rules
from cluster_ddp.submission.job_options import JobOptions
from cluster_ddp.submission.pack import rules as pack_rules
from cluster_ddp.submission.validation import check_fields, field_error, normalized_time


@dataclass(frozen=True, kw_only=True)
class JobSpec(JobOptions):
    """A job, checked. Its fields are those of `JobOptions` and `RankOptions`.

    Raises:
        SpecError: a field has an illegal value, or contradicts another field. The error names the field.
    """

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_nodes == self.nodes:
            object.__setattr__(self, "max_nodes", None)
        if self.time is not None:
            object.__setattr__(self, "time", normalized_time(self.time))
        if self.command[:1] == ("",) or any("\0" in argument for argument in self.command):
            hint = "name a program first"
            raise field_error("command", self.command, "a program and its arguments, without NUL bytes", hint=hint)
        object.__setattr__(self, "array", grids.checked_array(self.array, self.grid))
        spec_rules.check(self)
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


def of_task(spec: JobSpec) -> JobSpec:
    """Return the specification of an array's task, which resumes as a single job."""
    return derived(spec, array=None, grid={}, pack=None, jobs=None)


def derived(spec: JobSpec, **values: Any) -> JobSpec:
    """Return a specification with other values of some fields. They follow from checked ones, and are not checked."""
    made = copy.copy(spec)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made
