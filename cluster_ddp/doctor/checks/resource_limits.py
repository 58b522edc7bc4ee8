"""Limits: open files, address space, locked memory (getrlimit(2)), a node's ports, memory and shared memory."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from cluster_ddp.doctor.checks.check_types import Site, node_check, rank_check
from cluster_ddp.doctor.findings import Finding
from cluster_ddp.runtime.profiling.cpu_and_memory import MOUNT, memory_limits, step_folder

_MIB, _GIB = 1024**2, 1024**3
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
_SHM = Path("/dev/shm")
# A batch of 256 images of 224x224x3 bytes, twice for each of two workers.
_LEAST_SHM_MIB = 160


@rank_check
def open_files(site: Site) -> Iterator[Finding]:
    """Detect a limit of open files that the ranks' connections exceed.

    It is the hard limit: `distributed` raises the soft one.
    """
    limit, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[1], site.topology.world_size + _OTHER_FILES
    if limit != resource.RLIM_INFINITY and limit < needed:
        yield Finding(
            what="A process may open too few files for its connections and loader workers.",
            evidence=f"ulimit -Hn: {limit}; {site.topology.world_size} ranks need about {needed}",
            hint="raise the limit before sbatch, which hands it on (ulimit -n), or in slurmd's service (LimitNOFILE)",
        )


def are_too_low_for_checks() -> bool:
    """Return whether the doctor's own checks, each a process with a pipe, can't open their files."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] < _CHECKS_FILES


@rank_check
def address_space(site: Site) -> Iterator[Finding]:
    """Detect a limit of the address space, under which torch can't be imported."""
    limit = min(
        (value for value in resource.getrlimit(resource.RLIMIT_AS) if value != resource.RLIM_INFINITY), default=None
    )
    if limit is not None and limit < _LEAST_ADDRESS_SPACE:
        yield Finding(
            what="A process's address space is limited: torch and CUDA map far more than they use.",
            evidence=f"ulimit -v: {limit // 1024} KiB",
            hint="remove the limit before sbatch: ulimit -v unlimited (Slurm hands it on, or has VSizeFactor)",
            is_warning=not site.real_gpus and limit >= _TORCH_MAPS,
        )


@node_check
def locked_memory(site: Site) -> Iterator[Finding]:
    """Detect a limit of locked memory, where there is InfiniBand."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if limit != resource.RLIM_INFINITY and _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()):
        yield Finding(
            what="A process may lock little memory: NCCL can't register buffers with InfiniBand.",
            evidence=f"ulimit -Hl: {limit // 1024} KiB",
            hint="ask your site for LimitMEMLOCK=infinity in slurmd's service",
            is_warning=True,
        )


@node_check
def free_ports(site: Site) -> Iterator[Finding]:
    """Detect a node on which all ports for new connections are in use.

    It takes as many ports at once as the node's ranks will, of the system's choice (ip_local_port_range).
    """
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
        what="No ports are left on a node for new connections.",
        evidence=f"ports {ports} (net.ipv4.ip_local_port_range): {taken} of {wanted} were free",
        hint=f"see what holds them: ss -tanp; widen the range (your site); leave the node out: --exclude={site.host}",
        sick_nodes=(site.host,),
    )


@node_check
def memory_limit(site: Site, mount: Path = MOUNT) -> Iterator[Finding]:
    """Detect a memory limit that is smaller than what was asked for."""
    folder = _cgroup(mount)
    limits = [] if folder is None else memory_limits(folder)
    asked_mib, said = _asked_memory(site)
    if limits and min(limits) < 0.9 * asked_mib * _MIB:
        yield Finding(
            what="The memory limit is smaller than what the job asked for.",
            evidence=f"limit {min(limits) // _MIB} MiB (cgroup), {said} MiB",
            hint="give the step the job's memory: srun --mem=0; a shell may have left another: env | grep MEM",
        )


def _asked_memory(site: Site) -> tuple[int, str]:
    """Return the memory that was asked for on this node, in MiB, and the variables that say so; 0 if none does."""
    names = ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE")
    per_node, per_cpu, cpus = (site.env.get(name, "") for name in names)
    if per_node.isdigit():
        return int(per_node), f"SLURM_MEM_PER_NODE={per_node}"
    if per_cpu.isdigit() and cpus.isdigit():
        return int(per_cpu) * int(cpus), f"SLURM_CPUS_ON_NODE={cpus}, SLURM_MEM_PER_CPU={per_cpu}"
    return 0, ""


@node_check
def out_of_memory(site: Site, mount: Path = MOUNT) -> Iterator[Finding]:
    """Detect processes of this job that the kernel has killed for memory, also of its earlier steps.

    The job's memory.events counts those of its steps, too; memory.oom_control only its own.
    """
    folder = _cgroup(mount)
    if folder is None:
        return
    for path in (folder.parent / "memory.events", *folder.parent.glob("step_*/memory.oom_control")):
        if path.is_file():
            counts = dict(line.split() for line in path.read_text().splitlines() if len(line.split()) == 2)
            if int(counts.get("oom_kill", "0")):
                yield Finding(
                    what="The kernel has killed processes of this job for memory.",
                    evidence=f"oom_kill {counts['oom_kill']} in {path}",
                    hint="ask for more: --mem; or use fewer loader workers, or smaller batches",
                    is_warning=True,
                )


def _cgroup(mount: Path) -> Path | None:
    try:
        return step_folder(Path("/proc/self/cgroup").read_text(), "memory", mount)
    except OSError:
        return None


@node_check
def shared_memory(site: Site) -> Iterator[Finding]:
    """Detect /dev/shm: missing, not writable, or too small for loader workers."""
    hint = "mount a tmpfs there; in a container: docker run --shm-size=8g, apptainer exec --bind /dev/shm"
    path = _SHM / f".cluster-ddp-{os.getpid()}"
    try:
        with open(path, "xb") as file:
            file.write(b"x")
        status = os.statvfs(_SHM)
    except OSError as error:
        what = "/dev/shm can't be written: workers of a DataLoader pass batches through it."
        yield Finding(what=what, evidence=f"{error.strerror}: {path.parent}", hint=hint)
        return
    finally:
        with contextlib.suppress(OSError):  # read-only
            path.unlink()
    free_mib, size_mib = (blocks * status.f_frsize // _MIB for blocks in (status.f_bavail, status.f_blocks))
    if free_mib < _LEAST_SHM_MIB:
        is_small = size_mib < 2 * _LEAST_SHM_MIB
        state = "small" if is_small else "almost full"
        yield Finding(
            what=f"/dev/shm is {state}: workers of a DataLoader would end with a bus error.",
            evidence=f"{free_mib} of {size_mib} MiB free",
            hint=hint if is_small else "remove what earlier jobs have left there: ls -l /dev/shm",
            is_warning=True,
        )
