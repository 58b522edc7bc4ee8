"""`up --accounting`: a database, slurmdbd (slurmdbd.conf(5)), and accounts with limits, as on a shared cluster.

The partition main is not the default, and takes jobs of the accounts `lab` and `small` only. The default account,
`guest`, can't use it. All jobs of `small` together get two GPUs. The QOS `short` allows ten minutes.

Seen working with Debian's Slurm 22.05 and MariaDB 10.11.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from cluster_ddp.errors import SandboxError
from cluster_ddp.sandbox import prerequisites
from cluster_ddp.sandbox.layout import Layout
from cluster_ddp.slurm import commands

PACKAGES = ("slurmdbd", "mariadb-server-core", "mariadb-client-core")
PROGRAMS = ("slurmdbd", "sacctmgr", "mariadbd", "mariadb-install-db", "my_print_defaults")
ACCOUNTS = ("lab", "small")
"""The accounts that may use the partition main."""
SLURMDBD_PORT = 6819  # slurmdbd.conf(5): the default

_SLURM_CONF = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={address}
# For munge, that is its socket.
AccountingStoragePass={munge_socket}
AccountingStorageTRES=gres/gpu
AccountingStorageEnforce=associations,limits,qos
"""
_SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={munge_socket}
DbdHost=localhost
DbdAddr={address}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StorageLoc=slurm_acct_db
StorageUser=root
PidFile={folder}/slurmdbd.pid
LogFile={folder}/log/slurmdbd.log
"""


def require(slurm: Path | None) -> None:
    """Check that this machine has what the accounting needs. `slurm` is the prefix of its Slurm; None for the PATH's.

    Raises:
        SandboxError: a program is missing, or the Slurm is not the PATH's: slurmdbd must not be older than slurmctld.
    """
    asked = "A sandbox with accounting:"
    if slurm is not None:
        raise SandboxError(asked, f"the Slurm in {slurm} has no slurmdbd here.", "leave out --slurm or --slurm-version")
    if missing := prerequisites.missing_programs(PROGRAMS):
        hint = f"cluster-ddp sandbox up --accounting --install  (apt-get install {' '.join(PACKAGES)})"
        raise SandboxError(asked, f"not on this machine: {', '.join(missing)}.", hint)


def slurm_conf(layout: Layout) -> str:
    """Return what slurm.conf says of the accounting."""
    return _SLURM_CONF.format(address=layout.controller_address, munge_socket=layout.munge_socket)


def write(layout: Layout) -> None:
    """Write slurmdbd.conf and an empty database.

    Raises:
        SandboxError: mariadb-install-db failed.
    """
    conf = layout.folder / "slurmdbd.conf"
    conf.touch(mode=0o600)  # slurmdbd refuses a file that others may read
    values = {"address": layout.controller_address, "folder": layout.folder, "munge_socket": layout.munge_socket}
    conf.write_text(_SLURMDBD_CONF.format(**values))
    command = ["mariadb-install-db", *_options(layout), "--auth-root-authentication-method=normal", "--skip-test-db"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        found = f"{' '.join(command)} failed: {(done.stderr or done.stdout).strip()[-500:]}"
        raise SandboxError("Making the sandbox's database:", found, "start it without --accounting")


def database(layout: Layout) -> list[str]:
    """Return the command of the database. It listens in the controller's own network only."""
    files = (f"--socket={layout.folder}/database.socket", f"--pid-file={layout.folder}/database.pid")
    return ["mariadbd", *_options(layout), *files, "--bind-address=127.0.0.1", "--skip-name-resolve"]


def slurmdbd(layout: Layout) -> list[str]:
    """Return the command of slurmdbd, which looks for its configuration beside slurm.conf."""
    return ["env", f"SLURM_CONF={layout.slurm_conf}", "slurmdbd", "-D"]


def define(layout: Layout, env: dict[str, str]) -> None:
    """Make the cluster, the accounts, their users (root, and whoever has called sudo) and the QOS known.

    slurmdbd is up, slurmctld not yet. `env` is the environment of sacctmgr.

    Raises:
        SlurmError: sacctmgr failed.
    """
    users = sorted({"root", os.environ.get("SUDO_USER") or "root"})
    names = ",".join(("guest", *ACCOUNTS))
    for words in (
        ("add", "cluster", layout.name),
        ("add", "qos", "short", "MaxWall=10", "Priority=100"),
        ("add", "account", names, f"Cluster={layout.name}"),
        *(("add", "user", user, f"Account={names}", "DefaultAccount=guest", "QOS=normal,short") for user in users),
    ):
        commands.run(["sacctmgr", "--immediate", *words], env=env)


def limit_gpus(env: dict[str, str]) -> None:
    """Limit the GPUs of an account. slurmctld is up, and has made them known to slurmdbd. Raises SlurmError."""
    commands.run(["sacctmgr", "--immediate", "modify", "account", "small", "set", "GrpTRES=gres/gpu=2"], env=env)


def _options(layout: Layout) -> tuple[str, ...]:
    # --no-defaults first: a MariaDB of the machine may have its own settings.
    return ("--no-defaults", "--user=root", f"--datadir={layout.folder}/database", "--innodb-log-file-size=8M")
