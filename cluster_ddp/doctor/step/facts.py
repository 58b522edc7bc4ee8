"""What is compared between ranks: what each of them reads for that, without importing torch."""

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
from cluster_ddp.doctor.checks import Site, gpus, interfaces, names, python_env
from cluster_ddp.doctor.step import links

_LISTED_AT_MOST, _SAMPLED_AT_MOST, _SAMPLE = 1000, 32, 4096
_LOCAL = re.compile(r"\|-- (\S+)\n\s+/32 host LOCAL")
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "OMP_NUM_THREADS", "CUDA_HOME", "LD_PRELOAD")


def facts(site: Site) -> Iterator[str | tuple[str, Any]]:
    """Yield the name of each fact, then the name with its value. What may hang comes last."""
    readers: dict[str, Callable[[Site], Any]] = {
        "cpus": _cpus,
        "master_variables": _master_variables,
        "variables": _variables,
        "gpus": gpus.own,
    }
    if site.topology.local_rank == 0:
        if site.has_several_nodes:
            readers |= {"addresses": _addresses, "stack": _stack, "address": _address}
            readers |= {"master": _master, "interfaces": interfaces.taken}
        readers |= {"versions": _versions, "data": _data}
    for name, read in readers.items():
        yield name
        yield name, read(site)


def _cpus(site: Site) -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _master_variables(site: Site) -> dict[str, str]:
    return {name: site.env[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in site.env}


def _variables(site: Site) -> dict[str, str]:
    return {name: value for name, value in sorted(site.env.items()) if name.startswith(_PREFIXES)}


def _addresses(site: Site) -> list[str]:
    """All addresses of this node, as the kernel lists them."""
    ipv4 = _LOCAL.findall(Path("/proc/net/fib_trie").read_text())
    found = {str(ipaddress.ip_address(one)) for one in ipv4}
    with contextlib.suppress(OSError):  # a kernel without IPv6
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
        found |= {str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))) for line in lines}
    return sorted(found)


def _stack(site: Site) -> str:
    """What tells this machine's network from others: two of Slurm's nodes may be one machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(Path("/proc/self/ns/net").readlink())


def _address(site: Site) -> str | None:
    return links.own_address(site.topology)


def _master(site: Site) -> list[str] | None:
    try:
        return names.addresses_of(site.topology.master_addr)
    except OSError:
        return None


def _versions(site: Site) -> dict[str, str]:
    found = {
        "Python": ".".join(map(str, sys.version_info[:2])),
        "torch": (python_env.torch_versions() or {}).get("version", "none"),
        "NCCL": _nccl(),
        "cluster_ddp": f"{__version__} ({_digest_of_package()})",
        "this folder (git)": _commit(Path.cwd()),
    }
    return {name: version for name, version in found.items() if version}


def _nccl() -> str:
    """The version of NCCL that was installed with torch from PyPI; "" for another build, which has its own."""
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


def _commit(folder: Path) -> str:
    """The commit that is checked out in a folder; "" without one. The nodes may lack git."""
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


def _data(site: Site) -> str | None:
    return None if site.data_dir is None else _digest(site.data_dir)


def _digest(folder: Path) -> str:
    """A digest of the names and sizes in a folder, two levels deep, and of samples of the content."""
    paths = [path for path in sorted(folder.glob("*")) + sorted(folder.glob("*/*")) if path.is_file()][:_LISTED_AT_MOST]
    found = hashlib.sha256()
    for path in paths:
        found.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
    for path in paths[:: max(1, len(paths) // _SAMPLED_AT_MOST)]:
        found.update(_sample(path))
    return f"{len(paths)} files, {found.hexdigest()[:8]}"


def _sample(path: Path) -> bytes:
    """The beginning and the middle of a file."""
    with open(path, "rb") as file:
        begin = file.read(_SAMPLE)
        file.seek(path.stat().st_size // 2)
        return begin + file.read(_SAMPLE)


def _digest_of_package() -> str:
    folder = Path(str(cluster_ddp.__file__)).parent
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:8]
