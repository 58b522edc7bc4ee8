"""Limits: open files, address space, locked memory (getrlimit(2)), and the ports of a node."""

from __future__ import annotations

import errno
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from cluster_ddp.doctor.checks import Site, check
from cluster_ddp.doctor.finding import Finding
from cluster_ddp.protocol import Env

_GIB = 1024**3
# torch itself, its libraries and a few loader workers.
_OTHER_FILES = 256
# The doctor's own checks, their pipes and its connections on a node.
_CHECKS_FILES = 64
# A training on the CPU maps 3 GiB (CPU build of torch 2.15) to 4 GiB (CUDA build of 2.14), and more with its data. CUDA
# reserves as much as all memory together.
_TORCH_MAPS, _LEAST_ADDRESS_SPACE = int(3.5 * _GIB), 16 * _GIB
# A rank of NCCL listens on a few.
_PORTS_PER_RANK = 8
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_INFINIBAND = Path("/sys/class/infiniband")


@check(detects="a limit of open files that the ranks' connections exceed", on="rank")
def open_files(site: Site) -> Iterator[Finding]:
    """Read the hard limit: the soft one is raised by `distributed`."""
    limit, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[1], site.topology.world_size + _OTHER_FILES
    if limit != resource.RLIM_INFINITY and limit < needed:
        yield Finding(
            check="open_files",
            what="A process may open too few files for its connections and loader workers.",
            evidence=f"ulimit -Hn: {limit}; {site.topology.world_size} ranks need about {needed}",
            hint="raise the limit before sbatch, which hands it on (ulimit -n), or in slurmd's service (LimitNOFILE)",
        )


def are_too_low_for_checks() -> bool:
    """Return whether the doctor's own checks, each a process with a pipe, can't open their files."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] < _CHECKS_FILES


@check(detects="a limit of the address space, under which torch can't be imported", on="rank")
def address_space(site: Site) -> Iterator[Finding]:
    """Read RLIMIT_AS."""
    limit = min(
        (value for value in resource.getrlimit(resource.RLIMIT_AS) if value != resource.RLIM_INFINITY), default=None
    )
    if limit is not None and limit < _LEAST_ADDRESS_SPACE:
        has_gpus = site.topology.gpus_on_node and site.env.get(Env.DUMMY_GPUS) != "1"
        yield Finding(
            check="address_space",
            what="A process's address space is limited: torch and CUDA map far more than they use.",
            evidence=f"ulimit -v: {limit // 1024} KiB",
            hint="remove the limit before sbatch: ulimit -v unlimited (Slurm hands it on, or has VSizeFactor)",
            is_warning=not has_gpus and limit >= _TORCH_MAPS,
        )


@check(detects="a limit of locked memory, where there is InfiniBand")
def locked_memory(site: Site) -> Iterator[Finding]:
    """Read RLIMIT_MEMLOCK: InfiniBand registers memory, which locks it."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if limit != resource.RLIM_INFINITY and _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()):
        yield Finding(
            check="locked_memory",
            what="A process may lock little memory: NCCL can't register buffers with InfiniBand.",
            evidence=f"ulimit -Hl: {limit // 1024} KiB",
            hint="ask your site for LimitMEMLOCK=infinity in slurmd's service",
            is_warning=True,
        )


@check(detects="a node on which all ports for new connections are in use")
def free_ports(site: Site) -> Iterator[Finding]:
    """Take as many ports at once as the node's ranks will, of the system's choice (ip_local_port_range)."""
    wanted, taken = _PORTS_PER_RANK * site.ranks_here, 0
    with ExitStack() as open_ones:
        try:
            while taken < wanted:
                open_ones.enter_context(socket.socket()).bind(("", 0))
                taken += 1
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return  # such as no descriptors: another check
    ports = " to ".join(_PORT_RANGE.read_text().split())
    yield Finding(
        check="free_ports",
        what="No ports are left on a node for new connections.",
        evidence=f"ports {ports} (net.ipv4.ip_local_port_range): {taken} of {wanted} were free",
        hint=f"see what holds them: ss -tanp; widen the range (your site); leave the node out: --exclude={site.host}",
        sick_nodes=(site.host,),
    )
