"""Names, addresses and paths of a sandbox, all derived from its name and index."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from cluster_ddp.errors import SandboxError

STATE_ROOT = Path("/run/cluster-ddp-sandbox")
MAX_NODES = 64
CONTROLLER = "ctl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where everything of one sandbox is.

    Raises:
        SandboxError: the name, or a number of nodes or GPUs, is not allowed.
    """

    name: str
    """Of the sandbox: letters, digits and '-', at most 20."""
    index: int
    """0–255: the third byte of its addresses, distinct among the sandboxes of a machine."""
    nodes: int = 4
    """Number of compute nodes, 1–64."""
    gpus_per_node: int = 2
    """Dummy GPUs on each node, 0–16."""

    def __post_init__(self) -> None:
        check_name(self.name)
        sizes = (("--nodes", self.nodes, 1, MAX_NODES), ("--gpus-per-node", self.gpus_per_node, 0, 16))
        for option, value, low, high in sizes:
            if not low <= value <= high:
                found, hint = f"a sandbox can have {low} to {high}.", f"give {option} a number from {low} to {high}"
                raise SandboxError(f"A sandbox with {option} {value}:", found, hint)

    @property
    def folder(self) -> Path:
        """The sandbox's state; `down` removes it."""
        return STATE_ROOT / self.name

    @property
    def slurm_conf(self) -> Path:
        """What SLURM_CONF must point at for Slurm's commands to reach this sandbox."""
        return self.folder / "slurm.conf"

    @property
    def hosts(self) -> Path:
        """The nodes' own /etc/hosts (the machine's is never touched)."""
        return self.folder / "hosts"

    @property
    def slurm(self) -> Path:
        """A link to the prefix of its Slurm; missing if it uses the PATH's."""
        return self.folder / "slurm"

    @property
    def munge_socket(self) -> Path:
        """The socket of the sandbox's own munged."""
        return self.folder / "munge" / "socket"

    @property
    def bridge(self) -> str:
        """The network interface that joins the nodes; the machine itself is the login node on it."""
        return f"cddp{self.index}"

    def address(self, number: int) -> str:
        """One of the sandbox's addresses: 0 is the subnet's, 1 the machine's own on the bridge, 10 + N node N's."""
        return f"10.213.{self.index}.{number}"

    @property
    def controller_address(self) -> str:
        """Where slurmctld is."""
        return self.address(2)

    @property
    def node_names(self) -> list[str]:
        """node1 … nodeN."""
        return [f"node{i}" for i in range(1, self.nodes + 1)]

    @property
    def hosts_by_address(self) -> dict[str, str]:
        """Address -> host name of every namespace, the controller first."""
        nodes = {self.address(10 + i): name for i, name in enumerate(self.node_names, 1)}
        return {self.controller_address: CONTROLLER, **nodes}

    def namespace(self, host: str) -> str:
        """The network namespace of a host."""
        return f"{namespace_prefix(self.name)}{host}"

    def link(self, host: str) -> str:
        """The bridge's end of a host's link: at most 15 characters, Linux's limit."""
        return f"{self.bridge}{host.replace('node', 'n')}"


def search_path(prefix: Path | None) -> str:
    """The PATH, with a prefix's bin and sbin first if they exist."""
    ours = [str(prefix / part) for part in ("bin", "sbin") if (prefix / part).is_dir()] if prefix else []
    return ":".join([*ours, os.environ.get("PATH", os.defpath)])


def environment_of(name: str) -> dict[str, str]:
    """The environment for commands on a sandbox's login node."""
    outer = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    folder = STATE_ROOT / name
    return {**outer, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": search_path(folder / "slurm")}


def check_name(name: str) -> None:
    """Check a sandbox's name. Raises SandboxError if it is not allowed."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]{0,19}", name):
        found = "a name has 1 to 20 letters, digits and '-', and does not begin with '-'."
        raise SandboxError(f"A sandbox named {name!r}:", found, "choose another name: --name my-sandbox")


def namespace_prefix(name: str) -> str:
    """What the names of a sandbox's network namespaces begin with ('.' is in no sandbox's name)."""
    return f"cddp.{name}."
