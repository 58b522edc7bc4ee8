"""What a sandbox needs on the machine, and installing it on Debian and Ubuntu."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cluster_ddp.errors import SandboxError
from cluster_ddp.sandbox.layout import search_path

PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge"),
    *("iproute2", "util-linux"),
)
_OF_SLURM = ("slurmctld", "slurmd", "sbatch", "srun")
PROGRAMS = (*_OF_SLURM, "munged", "ip", "nsenter", "unshare")


def missing_programs(programs: Sequence[str] = PROGRAMS, *, path: str | None = None) -> list[str]:
    """The programs that are not on `path` (by default the PATH)."""
    return [program for program in programs if shutil.which(program, path=path) is None]


def require_root() -> None:
    """Check that this user may manage a sandbox. Raises SandboxError if not."""
    if os.geteuid() != 0:
        found = f"it needs root (network namespaces, munge); this is user id {os.geteuid()}."
        hint = "run it as root: sudo env PATH=$PATH cluster-ddp sandbox …"
        raise SandboxError("Managing a Slurm sandbox:", found, hint)


def require(slurm: Path | None = None) -> None:
    """Check that this machine can run a sandbox, with the Slurm of a prefix or the PATH's.

    Raises:
        SandboxError: not root, or programs missing.
    """
    require_root()
    if slurm and (missing := missing_programs(_OF_SLURM, path=f"{slurm}/bin:{slurm}/sbin")):
        found = f"not in its bin or sbin: {', '.join(missing)}."
        hint = "give --slurm the prefix that Slurm was installed to: --slurm /opt/slurm"
        raise SandboxError(f"Using the Slurm in {slurm}:", found, hint)
    if missing := missing_programs(path=search_path(slurm)):
        hint = f"cluster-ddp sandbox up --install  (apt-get install {' '.join(PACKAGES)})"
        raise SandboxError("Managing a Slurm sandbox:", f"not on this machine: {', '.join(missing)}.", hint)


def install(programs: Sequence[str] = PROGRAMS, names: Sequence[str] = PACKAGES) -> None:
    """Install these packages with apt-get unless all programs are here.

    Raises:
        SandboxError: no apt-get on this machine, not root, or apt-get failed.
    """
    if not missing_programs(programs):
        return
    asked = "Installing what the sandbox needs"
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        hint = f"install these programs yourself: {', '.join(missing_programs(programs))}"
        raise SandboxError(f"{asked}:", "it works only as root on Debian and Ubuntu (apt-get).", hint)
    with _one_at_a_time():
        if not missing_programs(programs):  # another process has installed them meanwhile
            return
        print(f"{asked}: {', '.join(names)} …", file=sys.stderr, flush=True)
        install_them = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", *names]
        for command in (["apt-get", "update", "-qq"], install_them):
            call(command, f"{asked} with: {' '.join(command)}")


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Wait for others that install here: `apt-get update` fails at once if another one runs."""
    folder = os.open("/var/lib/dpkg", os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def call(command: Sequence[str], asked: str) -> None:
    """Run a command of the package manager; `asked` is the first part of its error.

    Raises:
        SandboxError: it failed, or took longer than 10 minutes. The error has the end of its output.
    """
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired:
        raise SandboxError(asked, "it took longer than 10 minutes.", "check the network, and try again") from None
    if done.returncode != 0:
        said = "\n  ".join(done.stderr.strip().splitlines()[-5:])
        raise SandboxError(asked, said or f"exit status {done.returncode}.", "fix what it reports, and try again")
