"""Tier 1: what each node and each rank checks alone. Nothing here waits for another rank or imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster_ddp.doctor.finding import Finding
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A check, and how it is known to work."""

    name: str
    """Its name, which findings carry."""
    group: str
    """The module that it is in."""
    on: Literal["rank", "node", "run"]
    """Who runs it: each rank, the first rank of each node, or rank 0 for all."""
    detects: str
    """What it detects, in words."""
    function: Callable[[Site], Iterable[Finding]] | None
    """It returns its findings; None for what rank 0 sees in the reports of all."""


def check(
    *, detects: str, on: Literal["rank", "node"] = "node"
) -> Callable[[Callable[[Site], Iterable[Finding]]], Check]:
    """Make a check of a function. The function's name is the check's; its module is the check's group.

    Args:
        detects: what it detects, in words, for docs/reference/doctor.md.
        on: who runs it.
    """

    def made(function: Callable[[Site], Iterable[Finding]]) -> Check:
        group = function.__module__.rpartition(".")[2]
        return Check(name=function.__name__, group=group, on=on, detects=detects, function=function)

    return made


def of_all(group: str, **detected: str) -> tuple[Check, ...]:
    """Return the checks that rank 0 does with what all ranks report.

    Args:
        group: the module that does them.
        detected: name -> what the check detects, in words.
    """
    return tuple(
        Check(name=name, group=group, on="run", function=None, detects=detects) for name, detects in detected.items()
    )
