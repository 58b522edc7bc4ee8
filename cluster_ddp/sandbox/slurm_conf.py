"""slurm.conf and its companions for a sandbox (slurm.conf(5), gres.conf(5), cgroup.conf(5)).

Seen working with Slurm 22.05, 24.11 and 26.05.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
from pathlib import Path

from cluster_ddp.run.names import Env
from cluster_ddp.sandbox import accounting
from cluster_ddp.sandbox.layout import CONTROLLER, Layout, search_path

CPUS_PER_GPU = 4
NODE_MEMORY_MB = 16000

_SLURM_CONF = """\
# The sandbox {name!r} of cluster_ddp. `cluster-ddp sandbox down` removes this file.
ClusterName={name}
SlurmctldHost={controller}({controller_address})
SlurmUser=root
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
AuthType=auth/munge
# A requeued job may start again after 15 s instead of two minutes; see `_PATIENT`. On a busy machine 5 s were too few
# to launch a step ("Job credential expired").
AuthInfo=socket={munge_socket},cred_expire=15
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={folder}/task_prolog
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
# A node may claim more CPUs than the machine has.
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
# Shorter than on a cluster, so that faults can be tried out quickly.
KillWait=15
SlurmdTimeout=20
SlurmctldTimeout=20
BatchStartTimeout=20
CompleteWait=0
# Longer than by default (60 s): a step of a node that was cut off takes that long to end, and the node was drained.
UnkillableStepTimeout=300
SchedulerParameters=sched_interval=5,bf_interval=5,batch_sched_delay=0,sched_min_interval=100000
MinJobAge={min_job_age}
DefMemPerCPU=500
{plugin_dir}
{gres_types}
{accounting}
{nodes}
PartitionName=main Nodes=ALL {main} MaxTime=INFINITE DefaultTime=60 PriorityTier=1 State=UP
PartitionName=urgent Nodes=ALL MaxTime=INFINITE DefaultTime=60 PriorityTier=10 PreemptMode=OFF State=UP
"""

# If a node takes longer than MessageTimeout (10 s) to answer, slurmctld repeats its order a minute later (seen on a
# busy machine, 22.05). On a cluster no requeued job has started again by then. Here a job may have, and a repeated
# order to end a step would end the step of its new start.
_PATIENT = "MessageTimeout=60\nDebugFlags=NO_CONF_HASH\n"

# The nodes share one machine's cores, whatever CPUs they claim. Their GPUs are dummies, so ranks use the CPU.
_TASK_PROLOG = f"""\
#!/bin/sh
echo "export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-1}}"
echo "export {Env.DUMMY_GPUS}=1"
"""


def slurm_version(layout: Layout) -> tuple[int, int]:
    """The version of a sandbox's Slurm, such as (22, 5)."""
    env = {**os.environ, "PATH": search_path(layout.slurm)}
    text = subprocess.run(["slurmd", "-V"], env=env, capture_output=True, text=True, timeout=30).stdout
    match = re.search(r"(\d+)\.(\d+)", text)
    assert match, f"slurmd -V printed {text!r}"
    return int(match[1]), int(match[2])


def write(layout: Layout, slurm: Path | None, *, with_accounting: bool) -> None:
    """Write the sandbox's folder: configuration, dummy devices, and the folders that its daemons need.

    `slurm` is the prefix of its Slurm; None for the PATH's.
    """
    folder = layout.folder
    if slurm is not None:
        layout.slurm.symlink_to(slurm.resolve())
    for part in ("log", "state", "munge", "dev", *(f"spool/{node}" for node in layout.node_names)):
        (folder / part).mkdir(parents=True, mode=0o755)
    conf = _slurm_conf(layout, with_accounting)
    layout.slurm_conf.write_text(conf)
    (folder / "slurmctld.conf").write_text(conf + _PATIENT)  # not for commands: they would wait as long
    layout.hosts.write_text(_hosts(layout))
    prolog = folder / "task_prolog"
    prolog.write_text(_TASK_PROLOG)
    prolog.chmod(0o755)
    if slurm_version(layout) >= (24, 5):  # 23.11's slurmd does not start with the value
        (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
    key = folder / "munge" / "key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    if layout.gpus_per_node:
        for gpu in range(layout.gpus_per_node):
            # The device of /dev/null: Slurm needs a device file for each GPU and never opens it.
            os.mknod(folder / "dev" / f"gpu{gpu}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        numbers = "0" if layout.gpus_per_node == 1 else f"[0-{layout.gpus_per_node - 1}]"
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/dev/gpu{numbers}\n")


def _slurm_conf(layout: Layout, with_accounting: bool) -> str:
    cpus = max(8, CPUS_PER_GPU * layout.gpus_per_node)
    gres = f" Gres=gpu:{layout.gpus_per_node}" if layout.gpus_per_node else ""
    plugins = layout.slurm / "lib" / "slurm"
    addresses = {host: address for address, host in layout.hosts_by_address.items()}
    return _SLURM_CONF.format(
        name=layout.name,
        folder=layout.folder,
        munge_socket=layout.munge_socket,
        controller=CONTROLLER,
        controller_address=layout.controller_address,
        plugin_dir=f"PluginDir={plugins}" if plugins.is_dir() else "",
        gres_types="GresTypes=gpu" if gres else "",
        accounting=accounting.slurm_conf(layout) if with_accounting else "",
        # Without accounting, scontrol shows ended jobs for a day. With it, sacct does.
        min_job_age=10 if with_accounting else 86400,
        main=f"AllowAccounts={','.join(accounting.ACCOUNTS)}" if with_accounting else "Default=YES",
        nodes="\n".join(
            f"NodeName={node} NodeAddr={addresses[node]} CPUs={cpus} Boards=1 SocketsPerBoard=1 "
            f"CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory={NODE_MEMORY_MB}{gres} State=UNKNOWN"
            for node in layout.node_names
        ),
    )


def _hosts(layout: Layout) -> str:
    """The machine's own hosts file with the sandbox's names before it, so that look-ups work both ways.

    The IPv4-mapped addresses are those of peers on a dual-stack socket, such as a TCPStore's.
    """
    hosts = {"127.0.0.1": "localhost", **layout.hosts_by_address}
    ours = "".join(f"{address} {host}\n::ffff:{address} {host}\n" for address, host in hosts.items())
    machine = Path("/etc/hosts")
    return f"{ours}::1 localhost\n{machine.read_text() if machine.exists() else ''}"
