"""What a sandbox needs on the machine, and installing it on Debian and Ubuntu."""

from __future__ import annotations

import os
import shutil
import subprocess

from cluster_ddp.errors import SandboxError

PACKAGES = (
    "slurmctld",
    "slurmd",
    "slurm-client",
    "slurm-wlm-basic-plugins",
    "munge",
    "iproute2",
    "util-linux",
)
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "munged", "ip", "nsenter", "unshare")


def missing_programs() -> list[str]:
    """The programs that a sandbox needs and the PATH has not."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


def require() -> None:
    """Check that this machine can play a cluster at all.

    Raises:
        SandboxError: not root, or programs missing.
    """
    if os.geteuid() != 0:
        raise SandboxError(
            "Managing a Slurm sandbox:",
            f"it needs root (network namespaces, munge); this is user id {os.geteuid()}.",
            "run it as root: sudo env PATH=$PATH python -m cluster_ddp.sandbox …",
        )
    if missing := missing_programs():
        raise SandboxError(
            "Managing a Slurm sandbox:",
            f"not on this machine: {', '.join(missing)}.",
            f"python -m cluster_ddp.sandbox up --install  (apt-get install {' '.join(PACKAGES)})",
        )


def install() -> None:
    """Install `PACKAGES` with apt-get unless all programs are here.

    Raises:
        SandboxError: no apt-get on this machine, not root, or apt-get failed.
    """
    if not missing_programs():
        return
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise SandboxError(
            "Installing Slurm for the sandbox:",
            "that works as root on Debian and Ubuntu (apt-get) only.",
            f"install these programs yourself: {', '.join(missing_programs())}",
        )
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-qq", "-y", "--no-install-recommends", *PACKAGES],
    ):
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
        if done.returncode != 0:
            raise SandboxError(
                f"Installing Slurm for the sandbox with: {' '.join(command)}",
                "\n  ".join(done.stderr.strip().splitlines()[-5:]),
                "run that command by hand and mend what it says",
            )
