"""What is compared between ranks: what each of them reads for that, without importing torch."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cluster_ddp
from cluster_ddp._version import __version__
from cluster_ddp.doctor.checks import Site, gpus, names, python_env
from cluster_ddp.doctor.step import links

_LISTED_AT_MOST = 1000
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "OMP_NUM_THREADS", "CUDA_HOME", "LD_PRELOAD")


def facts(site: Site) -> Iterator[str | tuple[str, Any]]:
    """Yield the name of each fact, then the name with its value. What may hang comes last."""
    readers: dict[str, Callable[[Site], Any]] = {"cpus": _cpus, "variables": _variables, "gpus": gpus.own}
    if site.topology.local_rank == 0:
        if site.has_several_nodes:
            readers |= {"address": _address, "master": _master}
        readers |= {"versions": _versions, "data": _data}
    for name, read in readers.items():
        yield name
        yield name, read(site)


def _cpus(site: Site) -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _variables(site: Site) -> dict[str, str]:
    return {name: value for name, value in sorted(site.env.items()) if name.startswith(_PREFIXES)}


def _address(site: Site) -> str | None:
    return links.own_address(site.topology)


def _master(site: Site) -> list[str] | None:
    try:
        return names.addresses_of(site.topology.master_addr)
    except OSError:
        return None


def _versions(site: Site) -> dict[str, str]:
    torch = python_env.torch_versions() or {}
    return {
        "Python": ".".join(map(str, sys.version_info[:2])),
        "torch": torch.get("version", "none"),
        "cluster_ddp": f"{__version__} ({_digest_of_package()})",
    }


def _data(site: Site) -> str | None:
    return None if site.data_dir is None else _digest(site.data_dir)


def _digest(folder: Path) -> str:
    """A digest of the names and sizes in a folder, two levels deep."""
    entries: list[str] = []
    for path in sorted(folder.glob("*")) + sorted(folder.glob("*/*")):
        if len(entries) < _LISTED_AT_MOST and path.is_file():
            entries.append(f"{path.relative_to(folder)} {path.stat().st_size}")
    return f"{len(entries)} files, {hashlib.sha256(chr(10).join(entries).encode()).hexdigest()[:8]}"


def _digest_of_package() -> str:
    folder = Path(str(cluster_ddp.__file__)).parent
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
    return found.hexdigest()[:8]
