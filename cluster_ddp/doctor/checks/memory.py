"""Whether there is memory: the control group's limit, past kills, shared memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from cluster_ddp.doctor.checks import Site, check
from cluster_ddp.doctor.finding import Finding
from cluster_ddp.runtime.usage.cpu_and_memory import MOUNT, step_folder

_MIB = 1024**2
_SHM = Path("/dev/shm")
# A batch of 256 images of 224x224x3 bytes, twice for each of two workers.
_LEAST_SHM_MIB = 160


@check(detects="a memory limit that is smaller than what was asked for")
def memory_limit(site: Site, mount: Path = MOUNT) -> Iterator[Finding]:
    """Compare the control group's limit with SLURM_MEM_PER_NODE, or SLURM_MEM_PER_CPU times the step's CPUs here."""
    limit, (asked_mib, variables) = _limit(mount), _asked(site)
    if limit is not None and limit < 0.9 * asked_mib * _MIB:
        yield Finding(
            check="memory_limit",
            what="The memory limit is smaller than what the job asked for.",
            evidence=f"limit {limit // _MIB} MiB (cgroup), {variables} MiB",
            hint="give the step the job's memory: srun --mem=0; a shell may have left another: env | grep MEM",
        )


def _asked(site: Site) -> tuple[int, str]:
    """The memory that was asked for on this node, in MiB, and the variables that say so; 0 if none does."""
    per_node, per_cpu, cpus = (
        site.env.get(name, "") for name in ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE")
    )
    if per_node.isdigit():
        return int(per_node), f"SLURM_MEM_PER_NODE={per_node}"
    if per_cpu.isdigit() and cpus.isdigit():
        return int(per_cpu) * int(cpus), f"SLURM_CPUS_ON_NODE={cpus}, SLURM_MEM_PER_CPU={per_cpu}"
    return 0, ""


@check(detects="processes of this job that the kernel has killed for memory, also of its earlier steps")
def out_of_memory(site: Site, mount: Path = MOUNT) -> Iterator[Finding]:
    """Read the job's count of kills: memory.events has those below it, too, memory.oom_control only its own."""
    folder = _folder(mount)
    found = (
        [] if folder is None else [folder.parent / "memory.events", *folder.parent.glob("step_*/memory.oom_control")]
    )
    for path in found:
        if path.is_file():
            counts = dict(line.split() for line in path.read_text().splitlines() if len(line.split()) == 2)
            if int(counts.get("oom_kill", "0")):
                yield Finding(
                    check="out_of_memory",
                    what="The kernel has killed processes of this job for memory.",
                    evidence=f"oom_kill {counts['oom_kill']} in {path}",
                    hint="ask for more: --mem; or use fewer loader workers, or smaller batches",
                    is_warning=True,
                )


@check(detects="/dev/shm: missing, not writable, or too small for loader workers")
def shared_memory(site: Site) -> Iterator[Finding]:
    """Write a file to /dev/shm: workers of a DataLoader pass batches through it."""
    hint = "mount a tmpfs there; in a container: docker run --shm-size=8g, apptainer exec --bind /dev/shm"
    path = _SHM / f".cluster-ddp-{os.getpid()}"
    try:
        with open(path, "xb") as file:
            file.write(b"x")
        status = os.statvfs(_SHM)
    except OSError as error:
        what = "/dev/shm can't be written: workers of a DataLoader pass batches through it."
        yield Finding(check="shared_memory", what=what, evidence=f"{error.strerror}: {path.parent}", hint=hint)
        return
    finally:
        with contextlib.suppress(OSError):  # read-only
            path.unlink()
    free_mib, size_mib = (blocks * status.f_frsize // _MIB for blocks in (status.f_bavail, status.f_blocks))
    if free_mib < _LEAST_SHM_MIB:
        is_small = size_mib < 2 * _LEAST_SHM_MIB
        what = (
            f"/dev/shm is {'small' if is_small else 'almost full'}: workers of a DataLoader would end with a bus error."
        )
        hint = hint if is_small else "remove what earlier jobs have left there: ls -l /dev/shm"
        evidence = f"{free_mib} of {size_mib} MiB free"
        yield Finding(check="shared_memory", what=what, evidence=evidence, hint=hint, is_warning=True)


def _folder(mount: Path) -> Path | None:
    try:
        return step_folder(Path("/proc/self/cgroup").read_text(), "memory", mount)
    except OSError:
        return None


def _limit(mount: Path) -> int | None:
    """The lower limit of the step's and the job's; None without one."""
    folder, limits = _folder(mount), []
    for one in [] if folder is None else (folder, folder.parent):
        for path in (one / "memory.max", one / "memory.limit_in_bytes"):
            if path.is_file() and (text := path.read_text().strip()).isdigit():
                limits.append(int(text))
    return min(limits, default=None)
