"""What each rank reads for rank 0 to compare: versions, addresses, variables, GPUs, CPUs, data. It imports no torch."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import ipaddress
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cluster_ddp
from cluster_ddp._version import __version__
from cluster_ddp.doctor.checks import network_setup, task_allocation
from cluster_ddp.doctor.checks.check_types import Site
from cluster_ddp.doctor.checks.gpu_health import gpus_of_rank
from cluster_ddp.doctor.step import links

_LISTED_AT_MOST, _SAMPLED_AT_MOST, _SAMPLE = 1000, 32, 4096
_LOCAL = re.compile(r"\|-- (\S+)\n\s+/32 host LOCAL")
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "OMP_NUM_THREADS", "CUDA_HOME", "LD_PRELOAD")


def fingerprint(site: Site) -> Iterator[str | tuple[str, Any]]:
    """Yield the name of each value, then the name with the value. What may hang comes last."""
    env, topology = site.env, site.topology
    readers: dict[str, Callable[[], Any]] = {
        "cpus": lambda: sorted(os.sched_getaffinity(0)),
        "master_variables": lambda: {name: env[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in env},
        "variables": lambda: {name: value for name, value in sorted(env.items()) if name.startswith(_PREFIXES)},
        "gpus": lambda: gpus_of_rank(site),
    }
    if topology.local_rank == 0 and site.has_several_nodes:
        readers |= {
            "addresses": _addresses,
            "stack": _network_stack,
            "address": lambda: links.own_address(topology),
            "master": lambda: _addresses_of(topology.master_addr),
            "interfaces": lambda: network_setup.taken_interfaces(site),
        }
    if topology.local_rank == 0:
        data_dir = site.data_dir
        readers |= {"versions": _versions, "data": lambda: None if data_dir is None else _digest_of_data(data_dir)}
    for name, read in readers.items():
        yield name
        yield name, read()


def _addresses() -> list[str]:
    """Return all addresses of this node, as the kernel lists them."""
    ipv4 = _LOCAL.findall(Path("/proc/net/fib_trie").read_text())
    found = {str(ipaddress.ip_address(one)) for one in ipv4}
    with contextlib.suppress(OSError):  # a kernel without IPv6
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
        found |= {str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))) for line in lines}
    return sorted(found)


def _network_stack() -> str:
    """Return what tells this machine's network from others: two of Slurm's nodes may be one machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(Path("/proc/self/ns/net").readlink())


def _addresses_of(name: str) -> list[str] | None:
    with contextlib.suppress(OSError):
        return network_setup.addresses_of(name)
    return None


def _versions() -> dict[str, str]:
    found = {
        "Python": ".".join(map(str, sys.version_info[:2])),
        "torch": (task_allocation.torch_versions() or {}).get("version", "none"),
        "NCCL": _nccl(),
        "cluster_ddp": f"{__version__} ({_digest_of_package()})",
        "this folder (git)": _commit(Path.cwd()),
    }
    return {name: version for name, version in found.items() if version}


def _nccl() -> str:
    """Return the version of NCCL that was installed with torch from PyPI; "" for another build, which has its own."""
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


def _commit(folder: Path) -> str:
    """Return the commit that is checked out in a folder; "" without one. The nodes may lack git."""
    git = next((one / ".git" for one in (folder, *folder.parents) if (one / ".git").is_dir()), None)
    if git is None:
        return ""
    with contextlib.suppress(OSError):
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head[:12]
        name = head.removeprefix("ref: ")
        if (git / name).is_file():
            return (git / name).read_text().strip()[:12]
        packed = (line.split() for line in (git / "packed-refs").read_text().splitlines())
        return next((words[0][:12] for words in packed if words[1:] == [name]), "")
    return ""


def _digest_of_data(folder: Path) -> str:
    """Return a digest of the names and sizes in a folder, two levels deep, and of samples of the content."""
    paths = [path for path in sorted(folder.glob("*")) + sorted(folder.glob("*/*")) if path.is_file()][:_LISTED_AT_MOST]
    found = hashlib.sha256()
    for path in paths:
        found.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
    for path in paths[:: max(1, len(paths) // _SAMPLED_AT_MOST)]:
        with open(path, "rb") as file:
            found.update(file.read(_SAMPLE))
            file.seek(path.stat().st_size // 2)
            found.update(file.read(_SAMPLE))
    return f"{len(paths)} files, {found.hexdigest()[:8]}"


def _digest_of_package() -> str:
    folder = Path(str(cluster_ddp.__file__)).parent
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:8]
