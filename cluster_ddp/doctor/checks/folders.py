"""Whether the folders of a job are there, writable and not full."""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from cluster_ddp.doctor.checks.check_types import Site, node_check
from cluster_ddp.doctor.findings import Finding

_LEAST_FREE = 1024**3
_UNPACKED_AT_MOST = 64 * 1024**2
_WHY = {
    errno.ENOSPC: "it is full",
    errno.EDQUOT: "your quota there is used up",
    errno.EROFS: "it is mounted read-only",
    errno.EACCES: "you may not write there",
    errno.EPERM: "you may not write there",
    errno.ENOENT: "it is missing",
    errno.ENOTDIR: "it is not a folder",
}
_MENDED = {
    errno.ENOSPC: "remove old runs: du -sh runs/* | sort -h; or use another file system: --runs-dir PATH",
    errno.EDQUOT: "remove old runs, or ask for more quota; or use another file system: --runs-dir PATH",
}


@node_check
def submit_folder(site: Site) -> Iterator[Finding]:
    """Detect that the folder of the submission is not on a node.

    slurmd works in /tmp where the folder in which sbatch was called is missing.
    """
    folder = site.env.get("SLURM_SUBMIT_DIR", "")
    if folder and not Path(folder).is_dir():
        yield Finding(
            what="The folder where the job was submitted is not on a node.",
            evidence=f"no such folder: {folder} (working in {Path.cwd()})",
            hint="submit from a file system that all nodes share, or name a folder there: sbatch --chdir=PATH",
            sick_nodes=(site.host,),
        )


@node_check
def run_folder(site: Site) -> Iterator[Finding]:
    """Detect a run directory that is missing, read-only, full, over its quota or without inodes.

    It writes a file there, as a checkpoint is written.
    """
    if site.run_dir is None:
        return
    folder = _existing(site.run_dir)
    path = folder / f".cluster-ddp-{site.host}-{os.getpid()}"
    try:
        with open(path, "xb") as file:
            file.write(bytes(65536))
            file.flush()
            os.fsync(file.fileno())
        status = os.statvfs(folder)
    except OSError as error:
        why = _WHY.get(error.errno or 0, error.strerror or str(error))
        if error.errno == errno.ENOSPC and os.statvfs(folder).f_bavail:
            why = "it has no inodes left"
        yield Finding(
            what=f"The run directory can't be written: {why}.",
            evidence=f"{folder}: {error.strerror}",
            hint=_MENDED.get(error.errno or 0, "name a folder that you may write on all nodes: --runs-dir PATH"),
            sick_nodes=(site.host,) if error.errno in (errno.EROFS, errno.ENOENT) else (),
        )
        return
    finally:
        with contextlib.suppress(OSError):  # read-only
            path.unlink()
    free = status.f_bavail * status.f_frsize
    if free < _LEAST_FREE:
        yield Finding(
            what="The file system of the run directory is almost full.",
            evidence=f"{folder}: {free // 1024**2} MiB free",
            hint=_MENDED[errno.ENOSPC],
            is_warning=True,
        )


@node_check
def data_folder(site: Site) -> Iterator[Finding]:
    """Detect data that is missing, not readable or damaged (a small .gz, such as MNIST's) on a node."""
    if site.data_dir is None:
        return
    try:
        if any(site.data_dir.iterdir()):
            yield from _damaged(site, site.data_dir)
            return
        evidence = f"{site.data_dir} is empty"
    except OSError as error:
        evidence = f"{site.data_dir}: {error.strerror}"
    yield Finding(
        what="The data is not on a node.",
        evidence=evidence,
        hint="put it on a file system that all nodes share, or copy it first: srun --ntasks-per-node=1 cp …",
        sick_nodes=(site.host,),
    )


def _damaged(site: Site, folder: Path) -> Iterator[Finding]:
    left = _UNPACKED_AT_MOST
    for path in sorted([*folder.glob("*.gz"), *folder.glob("*/*.gz"), *folder.glob("*/*/*.gz")]):
        left -= path.stat().st_size
        if left < 0:
            return
        try:
            with gzip.open(path) as file:
                while file.read(1 << 20):
                    pass
        except (OSError, EOFError, zlib.error) as error:
            yield Finding(
                what="A file of the data is damaged on a node.",
                evidence=f"{path}: {error}",
                hint="download or copy it again; is the disk full, or was a copy interrupted?",
                sick_nodes=(site.host,),
            )


def _existing(folder: Path) -> Path:
    """The folder, or the one above it that will hold it."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder
