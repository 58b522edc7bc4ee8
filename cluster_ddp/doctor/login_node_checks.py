"""The checks of a login node: is there a cluster to submit to, and is everything in place for it?"""

from __future__ import annotations

import contextlib
import getpass
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from cluster_ddp.doctor.checks import all_checks, folders, resource_limits, task_allocation
from cluster_ddp.doctor.checks.check_types import Site
from cluster_ddp.doctor.findings import Finding, Verdict
from cluster_ddp.doctor.step.rank import DoctorOptions
from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.slurm import commands, partitions
from cluster_ddp.slurm.topology import Topology
from cluster_ddp.submission.cli import settings_files

_NODE_LOCAL = tuple(map(Path, ("/tmp", "/var/tmp", "/dev/shm", "/scratch/local", "/local")))
_LOCAL_KINDS = ("tmpfs", "ramfs", "overlay")
# A login node may be the server of /home, but not of the root file system.
_DISK_KINDS = ("ext3", "ext4", "xfs", "btrfs", "zfs")

CHECKS = {
    "slurm": "a login node on which Slurm's commands are missing or its controller does not answer",
    "partitions": "a cluster whose partitions have no usable node with GPUs",
    "cluster_toml": "a cluster.toml that can't be read or has unknown keys",
    "node_local": "a run directory in /tmp, in memory, in a container's layer or on this machine's own disk",
}
"""Name of a check -> what it detects."""


def examine(options: DoctorOptions, env: Mapping[str, str]) -> int:
    """Examine this login node, print the verdict, and return the exit status."""
    verdict = Verdict(subject=f"the login node {os.uname().nodename}, as {getpass.getuser()}", num_nodes=0)
    site = Site(
        env=env,
        topology=Topology(launcher="single", rank=0, local_rank=0, world_size=1, master_addr="", port_candidates=(0,)),
        host=os.uname().nodename,
        run_dir=options.run_dir or Path("runs"),
        data_dir=options.data_dir,
    )
    for name, (findings_of, shown) in _TIERS.items():
        start = time.monotonic()
        found = _run(name, findings_of, site, options.check_limit_s)
        verdict.add(name, time.monotonic() - start, found, "" if found else shown())
    verdict.show(as_json=options.json)
    verdict.write_nodes(options.exclude_file)
    return verdict.status(strict=options.strict)


def _run(tier: str, findings_of: Callable[[Site], Iterator[Finding]], site: Site, limit_s: float) -> list[Finding]:
    """Return the findings of a tier, which runs in a process of its own: a file system may hang."""
    result = all_checks.Running({tier: lambda: map(asdict, findings_of(site))}).results(limit_s)[tier]
    return [*map(Finding.from_json, result.items), *all_checks.broken_off(tier, result, None, limit_s)]


def _slurm(site: Site) -> Iterator[Finding]:
    try:
        _slurm_version()
        groups = partitions.read()
    except ClusterDDPError as error:
        yield Finding.of_error("slurm", error)
        return
    if not any(group.usable and group.up and group.gpus_of(None) for group in groups):
        yield Finding(
            check="partitions",
            what="No partition has a usable node with GPUs.",
            evidence=_shown_cluster(groups) or "sinfo shows no partition",
            hint="look at the nodes' states and reasons: sinfo -N -o '%N %P %G %T %E'",
            is_warning=True,
        )


def _settings(site: Site) -> Iterator[Finding]:
    try:
        settings_files.load(None, folder=Path.cwd(), env=site.env)
    except ClusterDDPError as error:
        yield Finding.of_error("cluster_toml", error)


def _python(site: Site) -> Iterator[Finding]:
    """Check this Python and this shell's limits, which sbatch hands on. A job may have another Python."""
    for check in (task_allocation.other_environment, resource_limits.address_space, resource_limits.open_files):
        yield from check.run(site)
    with contextlib.suppress(ClusterDDPError):  # a finding of another tier
        gpus = max((group.gpus_of(None) for group in partitions.read() if group.usable), default=0)
        site = replace(site, topology=replace(site.topology, gpus_on_node=gpus))
    yield from (replace(found, is_warning=True) for found in task_allocation.torch_build.run(site))


def _files(site: Site) -> Iterator[Finding]:
    yield from folders.run_folder.run(site)
    yield from folders.data_folder.run(site)
    assert site.run_dir is not None
    folder = site.run_dir.absolute()
    mount, kind = _file_system(folder)
    is_local = kind in _LOCAL_KINDS or (mount == "/" and kind in _DISK_KINDS)
    if is_local or any(folder.is_relative_to(local) for local in _NODE_LOCAL):
        yield Finding(
            check="node_local",
            what="Run directories would be in a folder that other nodes may not see.",
            evidence=f"{folder}, on {kind} ({mount})",
            hint="submit from a folder on a shared file system, or name one: --runs-dir PATH",
            is_warning=True,
        )


def _file_system(folder: Path) -> tuple[str, str]:
    """Return the mount point and type of the file system that a folder is on."""
    best = ("", "an unknown file system")
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split(" ")
        mount = mount.replace("\\040", " ")
        if folder.is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, kind)
    return best


def _slurm_version() -> str:
    return commands.run(["sinfo", "--version"], timeout_s=10).strip()


def _shown_cluster(groups: list[partitions.NodeGroup]) -> str:
    parts = []
    for name in dict.fromkeys(group.partition for group in groups):
        those = [group for group in groups if group.partition == name]
        gpus = " or ".join(dict.fromkeys(f"{one.gpus_of(None)} GPUs" for one in those if one.gpus_of(None))) or "no GPU"
        parts.append(f"{name}: {sum(one.nodes for one in those if one.usable)} nodes, {gpus} each")
    return "; ".join(parts)


def _shown_torch() -> str:
    found = task_allocation.torch_versions() or {}
    return f"torch {found.get('version')}, CUDA {found.get('cuda')}"


_TIERS: dict[str, tuple[Callable[[Site], Iterator[Finding]], Callable[[], str]]] = {
    "Slurm": (_slurm, lambda: f"{_slurm_version()}; {_shown_cluster(partitions.read())}"),
    "settings": (_settings, str),
    "Python": (_python, _shown_torch),
    "files": (_files, str),
}
"""Name -> what returns its findings, and what shows a sound one."""
