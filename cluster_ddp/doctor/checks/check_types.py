"""A check, and what it may look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from cluster_ddp.doctor.findings import Finding
from cluster_ddp.run.names import Env
from cluster_ddp.slurm.topology import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """What a check may look at."""

    env: Mapping[str, str]
    """This process's environment."""
    topology: Topology
    """This rank's place."""
    host: str
    """Name of this node."""
    run_dir: Path | None = None
    """The run directory, or the folder where it will be made."""
    data_dir: Path | None = None
    """Folder of the data."""

    @property
    def ranks_here(self) -> int:
        """Number of ranks on this node."""
        return self.topology.local_world_size or 1

    @property
    def has_several_nodes(self) -> bool:
        """Whether ranks are on other nodes, too, as far as the environment says it."""
        return self.topology.num_nodes != 1

    @property
    def real_gpus(self) -> int:
        """Number of GPUs on this node; 0 if they are dummy ones, for tests."""
        return 0 if self.env.get(Env.DUMMY_GPUS) == "1" else self.topology.gpus_on_node or 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A check, and how it is known to work."""

    name: str
    """Its name, which findings carry."""
    on: Literal["rank", "node"]
    """Who runs it: each rank, or the first rank of each node."""
    detects: str
    """What it detects, in words, for docs/reference/doctor.md."""
    function: Callable[[Site], Iterable[Finding]]
    """It returns its findings."""

    def run(self, site: Site) -> Iterator[Finding]:
        """Return what it finds."""
        return (replace(found, check=self.name) for found in self.function(site))


def node_check(function: Callable[[Site], Iterable[Finding]]) -> Check:
    """Make a check of a function for the first rank of each node: its docstring says what it detects."""
    return Check(name=function.__name__, on="node", detects=_detects(function.__doc__ or ""), function=function)


def rank_check(function: Callable[[Site], Iterable[Finding]]) -> Check:
    """Make a check of a function for each rank: its docstring says what it detects."""
    return replace(node_check(function), on="rank")


def _detects(docstring: str) -> str:
    """Return what the first paragraph of a docstring names: "Detect …" or "Detect that …"."""
    text = " ".join(docstring.partition("\n\n")[0].split())
    return text.removeprefix("Detect ").removeprefix("that ").removesuffix(".")
