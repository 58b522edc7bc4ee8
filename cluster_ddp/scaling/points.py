"""The configurations of a scaling study: for each number of GPUs as few nodes as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster_ddp.errors import SpecError


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One run of a configuration."""

    gpus: int
    """Number of GPUs of the job."""
    nodes: int
    """Number of nodes."""
    repeat: int
    """Number of the run of this configuration, from 1."""

    @property
    def gpus_per_node(self) -> int:
        """Number of GPUs on each node."""
        return self.gpus // self.nodes

    @property
    def name(self) -> str:
        """Name of its job."""
        return f"gpus{self.gpus}-run{self.repeat}"


def parse_counts(text: str) -> list[int]:
    """Parse numbers of GPUs, such as "1,2,4,8". Returns them in ascending order, each once.

    Raises:
        SpecError: there is none, or one is no whole number of 1 or more.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and 0 < int(word) < 1_000_000 for word in words):
        raise SpecError(f"Measuring with {text!r} GPUs:", "it is a list of whole numbers.", "--gpus 1,2,4,8")
    return sorted({int(word) for word in words})


def points(counts: Sequence[int], *, per_node: int, repeats: int) -> list[Point]:
    """Return the runs of a study: all configurations once, then again. A node is filled before the next one is used.

    Args:
        counts: numbers of GPUs.
        per_node: number of GPUs of a node.
        repeats: number of runs of each configuration.
    """
    return [
        Point(gpus=count, nodes=_nodes(count, per_node), repeat=repeat)
        for repeat in range(1, repeats + 1)
        for count in counts
    ]


def _nodes(count: int, per_node: int) -> int:
    """The fewest nodes on which a number of GPUs can be spread equally."""
    return next(nodes for nodes in range(1, count + 1) if count % nodes == 0 and count // nodes <= per_node)
