"""Misconfigurations that are made for real in the tasks of a step, and what the doctor must find first."""

from __future__ import annotations

from dataclasses import dataclass

ON_2 = '[[ $SLURMD_NODENAME == node2 ]] || exec "$@"\n'
"""For lines of bash: only on node2; the doctor starts at once on the other."""
RANK_3 = '((SLURM_PROCID == 3)) || exec "$@"\n'
SOON = "renice -n -15 -p $$ >/dev/null || true\n"
"""The doctor leaves out the time that it waits for a core: on a busy machine, that can be most of a slow link's."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A misconfiguration."""

    title: str
    check: str
    """The check that must find it."""
    found: tuple[str, ...]
    """Parts of the first finding's text."""
    lines: str = ""
    """Lines of bash before the doctor, in each task, in a mount namespace of its own. "$@" is the doctor."""
    options: tuple[str, ...] = ()
    """For srun."""
    arguments: tuple[str, ...] = ("--quick",)
    """For the doctor."""
    on_nodes: tuple[tuple[str, str], ...] = ()
    """Node, and lines of bash in its network namespace, while the doctor runs."""
    undone: tuple[tuple[str, str], ...] = ()
    """Node, and lines of bash after that."""


def _hand_set(rank: str, size: int) -> str:
    return (
        f"export RANK={rank} WORLD_SIZE={size} LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=2 NODE_RANK=$SLURM_NODEID\n"
        "export MASTER_ADDR=node1\n"
    )


LAUNCH = (
    Fault(
        title="one task for two GPUs",
        check="topology",
        found=("fewer tasks than GPUs", "--ntasks-per-node=2"),
        options=("--ntasks-per-node=1",),
    ),
    Fault(
        title="three tasks for two GPUs",
        check="topology",
        found=("more tasks than GPUs",),
        options=("--ntasks-per-node=3",),
    ),
    Fault(
        title="RANK exported in the batch shell",
        check="topology",
        found=("RANK=0, SLURM_PROCID=", "unset RANK"),
        lines="export RANK=0",
    ),
    Fault(
        title="a container that lacks SLURM_LOCALID",
        check="topology",
        found=("SLURM_LOCALID unset", "into the container"),
        lines="unset SLURM_LOCALID SLURM_GPUS_ON_NODE",
    ),
    Fault(
        title="a container that lacks the number of tasks",
        check="topology",
        found=("SLURM_STEP_NUM_TASKS unset",),
        lines="unset SLURM_STEP_NUM_TASKS SLURM_NTASKS SLURM_NPROCS",
    ),
    Fault(
        title="ranks set by hand, two of them equal",
        check="same_rank",
        found=("Several tasks have rank 0", "node1 and node2"),
        lines=_hand_set("$((SLURM_PROCID % 3))", 3),
    ),
    Fault(
        title="WORLD_SIZE set by hand, larger than what was started",
        check="missing_ranks",
        found=("WORLD_SIZE=6, but this step has 4 tasks", "unset WORLD_SIZE"),
        lines=_hand_set("$SLURM_PROCID", 6),
        arguments=("--quick", "--wait-s", "8"),
    ),
    Fault(
        title="a MASTER_PORT that is no port",
        check="topology",
        found=("MASTER_PORT=99999", "unset MASTER_PORT"),
        lines="export MASTER_PORT=99999",
    ),
    Fault(
        title="a MASTER_PORT that another program holds",
        check="master_port",
        found=("Port 4711", "in use by another program"),
        lines="export MASTER_PORT=4711\n"
        "if ((SLURM_PROCID == 0)); then\n"
        "  python -c 'import pathlib, socket, time\n"
        'held = socket.create_server(("", 4711))\n'
        'pathlib.Path("held").touch(); time.sleep(15)\' >/dev/null 2>&1 </dev/null &\n'
        "fi\n"
        "until [[ -e held ]]; do sleep 0.1; done",
    ),
    Fault(
        title="another MASTER_PORT in each task",
        check="master_variables",
        found=("MASTER_PORT is not the same on all ranks", "MASTER_PORT=20003", "before srun"),
        lines="export MASTER_PORT=$((20000 + SLURM_PROCID))",
    ),
    Fault(
        title="CUDA_VISIBLE_DEVICES emptied in a start file",
        check="hidden_gpus",
        found=("CUDA_VISIBLE_DEVICES=''", "unset CUDA_VISIBLE_DEVICES"),
        lines="export CUDA_VISIBLE_DEVICES=",
    ),
    Fault(
        title="the same GPU listed twice",
        check="gpu_listed_twice",
        found=("CUDA_VISIBLE_DEVICES=0,0",),
        lines="export CUDA_VISIBLE_DEVICES=0,0",
    ),
)
STARTS = (
    Fault(
        title="a rank that sleeps before Python starts",
        check="missing_ranks",
        found=("1 of 4 ranks did not report within", "s: rank 3 (node2)", "ranks 0-2 reported"),
        lines=RANK_3 + "exec sleep 8",
        arguments=("--quick", "--wait-s", "3"),
    ),
    Fault(
        title="a stopped rank",
        check="missing_ranks",
        found=(
            "1 of 4 ranks did not report within",
            "s: rank 3 (node2)",
        ),
        lines=RANK_3 + "kill -STOP $$",
        options=("--kill-on-bad-exit=1",),
        arguments=("--quick", "--wait-s", "3"),
    ),
    Fault(
        title="a rank that ends before Python starts",
        check="missing_ranks",
        found=(
            "1 of 4 ranks did not report within",
            "s: rank 3 (node2)",
        ),
        lines=RANK_3 + "exit 1",
        arguments=("--quick", "--wait-s", "3"),
    ),
    Fault(
        title="a node on which nothing starts",
        check="missing_ranks",
        found=("2 of 4 ranks did not report within", "s: rank 2, 3 (node2)", "--exclude=node2"),
        lines=ON_2 + "exec sleep 8",
        arguments=("--quick", "--wait-s", "3"),
    ),
    Fault(
        title="rank 0 never starts",
        check="missing_ranks",
        found=("1 of 4 ranks did not report within 3 s: rank 0 (node1)",),
        lines='((SLURM_PROCID == 0)) || exec "$@"\nexec sleep 12',
        arguments=("--quick", "--wait-s", "3"),
    ),
)
NAMES = (
    Fault(
        title="MASTER_ADDR=127.0.0.1 on two nodes",
        check="master_address",
        found=("leads each node to itself", "unset MASTER_ADDR"),
        lines="export MASTER_ADDR=127.0.0.1",
    ),
    Fault(
        title="a MASTER_ADDR that does not exist",
        check="master_address",
        found=("The name of rank 0's host is unknown: nohost.invalid", "unset MASTER_ADDR"),
        lines="export MASTER_ADDR=nohost.invalid",
    ),
    Fault(
        title="a MASTER_ADDR that has no route",
        check="other_master",
        found=("198.51.100.7",),
        lines="export MASTER_ADDR=198.51.100.7",
    ),
    Fault(
        title="an /etc/hosts that leads node1's name to loopback on node2",
        check="master_address",
        found=("leads each node to itself", "node2", "127.0.1.1", "correct /etc/hosts on node2"),
        lines=ON_2 + "echo '127.0.1.1 node1' >hosts.a && mount --bind hosts.a /etc/hosts",
    ),
    Fault(
        title="an /etc/hosts that leads node1's name to another machine on node2",
        check="other_master",
        found=("resolves to another machine", "node2: node1 is 198.51.100.9"),
        lines=ON_2 + "echo '198.51.100.9 node1' >hosts.b && mount --bind hosts.b /etc/hosts",
    ),
    Fault(
        title="a link-local IPv6 address for node1",
        check="master_address",
        found=("link-local", "fe80::1"),
        lines="echo 'fe80::1 node1' >hosts.c.$SLURM_PROCID && mount --bind hosts.c.$SLURM_PROCID /etc/hosts",
    ),
    Fault(
        title="Debian's 127.0.1.1 for a node's own name",
        check="own_name",
        found=("own name", "node2 is 127.0.1.1", "export GLOO_SOCKET_IFNAME=eth0"),
        lines=ON_2 + "{ grep -v node2 /etc/hosts; echo '127.0.1.1 node2'; } >hosts.d.$SLURM_PROCID\n"
        "mount --bind hosts.d.$SLURM_PROCID /etc/hosts",
    ),
)
INTERFACES = (
    Fault(
        title="GLOO_SOCKET_IFNAME names an interface that is not there",
        check="gloo_interface",
        found=("names an interface that is not there: ib0", "interfaces here: lo, eth0"),
        lines="export GLOO_SOCKET_IFNAME=ib0",
    ),
    Fault(
        title="GLOO_SOCKET_IFNAME with NCCL's ^",
        check="gloo_interface",
        found=("gloo does not know '^'",),
        lines="export GLOO_SOCKET_IFNAME=^docker0",
    ),
    Fault(
        title="GLOO_SOCKET_IFNAME=lo on two nodes",
        check="gloo_interface",
        found=("no other node reaches the loopback interface",),
        lines="export GLOO_SOCKET_IFNAME=lo",
    ),
    Fault(
        title="a GLOO_DEVICE_TRANSPORT that gloo does not have",
        check="gloo_transport",
        found=("gloo has no transport 'ib'", "unset GLOO_DEVICE_TRANSPORT"),
        lines="export GLOO_DEVICE_TRANSPORT=ib",
    ),
    Fault(
        title="a GLOO_DEVICE_TRANSPORT that this build of torch lacks",
        check="gloo_transport",
        found=("This build of torch lacks the transport", "unset GLOO_DEVICE_TRANSPORT"),
        lines="export GLOO_DEVICE_TRANSPORT=UV",
        arguments=(),
    ),
    Fault(
        title="NCCL_SOCKET_IFNAME that fits no interface",
        check="nccl_interface",
        found=("NCCL_SOCKET_IFNAME=ib fits no interface",),
        lines="export NCCL_SOCKET_IFNAME=ib",
    ),
    Fault(
        title="a container without the host's network",
        check="no_network",
        found=("no network interface that is up", "--exclude=node2"),
        lines=ON_2 + 'exec unshare --net "$@"',
    ),
)
LIMITS = (
    Fault(
        title="one CPU for a task that asked for two",
        check="fewer_cpus",
        found=("1 of 2", "srun --cpus-per-task=2"),
        options=("--cpus-per-task=2",),
        lines='exec taskset -c 0 "$@"',
    ),
    Fault(
        title="all ranks of a node on one CPU",
        check="one_cpu",
        found=("share fewer CPUs than they are", "CPU 0"),
        lines='exec taskset -c 0 "$@"',
    ),
    Fault(
        title="OMP_NUM_THREADS for a whole node in each rank",
        check="too_many_threads",
        found=("OMP_NUM_THREADS=64", "export OMP_NUM_THREADS=1"),
        lines="export OMP_NUM_THREADS=64",
    ),
    Fault(
        title="a small /dev/shm",
        check="shared_memory",
        found=("/dev/shm is small", "of 1 MiB free"),
        lines="mount -t tmpfs -o size=1m none /dev/shm",
    ),
    Fault(
        title="a /dev/shm that can't be written",
        check="shared_memory",
        found=("/dev/shm can't be written",),
        lines="mount -t tmpfs -o ro none /dev/shm",
    ),
    Fault(
        title="a low limit of open files",
        check="open_files",
        found=("ulimit -Hn: 200",),
        lines="ulimit -n 200",
    ),
    Fault(
        title="so low a limit of open files that the doctor's own checks can't run",
        check="open_files",
        found=("ulimit -Hn: 12", "ulimit -n"),
        lines="ulimit -n 12",
    ),
    Fault(
        title="a limited address space",
        check="address_space",
        found=("ulimit -v: 3000000 KiB",),
        lines="ulimit -v 3000000",
    ),
)
FILES = (
    Fault(
        title="a run directory that is read-only on one node",
        check="run_folder",
        found=("it is mounted read-only", "node2: "),
        lines=ON_2 + "mount --bind run run && mount -o remount,ro,bind run",
        arguments=("--quick", "--run-dir", "run"),
    ),
    Fault(
        title="a full disk",
        check="run_folder",
        found=("it is full", "No space left on device"),
        lines="mount -t tmpfs -o size=4k none run",
        arguments=("--quick", "--run-dir", "run"),
    ),
    Fault(
        title="no inodes left",
        check="run_folder",
        found=("it has no inodes left",),
        lines="mount -t tmpfs -o nr_inodes=1 none run",
        arguments=("--quick", "--run-dir", "run"),
    ),
    Fault(
        title="a run directory on each node's own disk",
        check="not_shared",
        found=("not the same folder on all nodes", "ranks 2-3 (node2)"),
        lines=ON_2 + "mount -t tmpfs -o size=2g none run",
        arguments=("--quick", "--run-dir", "run"),
    ),
    Fault(
        title="data that is missing on one node",
        check="data_folder",
        found=("The data is not on a node", "data is empty", "node2"),
        lines=ON_2 + "mount -t tmpfs none data",
        arguments=("--quick", "--data-dir", "data"),
    ),
    Fault(
        title="an incomplete copy of the data on one node",
        check="data",
        found=("not the same on all nodes", "node2: 2 files"),
        lines=ON_2 + "mount --bind half data",
        arguments=("--quick", "--data-dir", "data"),
    ),
    Fault(
        title="data of the same size with other content on one node",
        check="data",
        found=("not the same on all nodes", "node2: 3 files"),
        lines=ON_2 + "mount --bind other data",
        arguments=("--quick", "--data-dir", "data"),
    ),
    Fault(
        title="a damaged file of the data on one node",
        check="data_folder",
        found=("A file of the data is damaged on a node", "node2", "train.gz"),
        lines=ON_2 + "mkdir cut.$SLURM_PROCID; gzip -c /etc/services | head -c 500 >cut.$SLURM_PROCID/train.gz\n"
        "mount --bind cut.$SLURM_PROCID data",
        arguments=("--quick", "--data-dir", "data"),
    ),
    Fault(
        title="the folder of the submission is on one node only",
        check="submit_folder",
        found=("is not on a node", "no such folder"),
        lines=ON_2 + "export SLURM_SUBMIT_DIR=$PWD/elsewhere/project",
    ),
)
HANGS = (
    Fault(
        title="a data folder that hangs on one node (by a Python that sleeps)",
        check="did_not_return",
        found=("The check data_folder (files) did not come back", "node2", "--exclude=node2"),
        lines=ON_2 + "export PYTHONPATH=$PWD/hangs:$PYTHONPATH",
        arguments=("--quick", "--data-dir", "data", "--check-limit-s", "5", "--wait-s", "5"),
    ),
    Fault(
        title="a data folder that hangs on rank 0's node (by a Python that sleeps)",
        check="did_not_return",
        found=("The check data_folder (files) did not come back", "node1", "--exclude=node1"),
        lines='[[ $SLURMD_NODENAME == node1 ]] || exec "$@"\nexport PYTHONPATH=$PWD/hangs:$PYTHONPATH',
        arguments=("--quick", "--data-dir", "data", "--check-limit-s", "5", "--wait-s", "5"),
    ),
    Fault(
        title="a torch that ends rank 0's process",
        check="missing_ranks",
        found=("Ranks ended or hung in the tier 'import'", "rank 0 (node1)", "--exclude=node1"),
        lines='((SLURM_PROCID == 0)) || exec "$@"\nexport PYTHONPATH=$PWD/ends:$PYTHONPATH',
        arguments=(),
    ),
)
PYTHONS = (
    Fault(
        title="a Python without torch",
        check="torch_build",
        found=("This Python has no torch", "--venv"),
        lines='shift; exec "$PYTHON" -S "$@"',
    ),
    Fault(
        title="another torch on one node",
        check="versions",
        found=("different versions of torch", "node2: torch 1.0.0"),
        lines=ON_2 + "export PYTHONPATH=$PWD/older:$PYTHONPATH",
    ),
    Fault(
        title="other code on one node",
        check="versions",
        found=("different versions of cluster_ddp", "--snapshot"),
        lines=ON_2 + "export PYTHONPATH=$PWD/../copy",
    ),
    Fault(
        title="torch's CPU build on nodes with GPUs",
        check="torch_build",
        found=("This torch has no GPU support",),
        lines="export PYTHONPATH=$PWD/older:$PYTHONPATH; unset CLUSTER_DDP_DUMMY_GPUS",
    ),
    Fault(
        title="a torch that can't be imported",
        check="torch_import",
        found=("torch can't be imported", "libcudart.so.13"),
        lines="export PYTHONPATH=$PWD/older:$PYTHONPATH",
        arguments=(),
    ),
    Fault(
        title="a virtual environment that is not on the node",
        check="other_environment",
        found=("The virtual environment is not on a node", "VIRTUAL_ENV="),
        lines=ON_2 + "export VIRTUAL_ENV=$PWD/elsewhere/venv",
    ),
    Fault(
        title="another Python than the activated environment's",
        check="other_environment",
        found=("Another Python runs", "type -a python"),
        lines="export VIRTUAL_ENV=$PWD",
    ),
    Fault(
        title="NCCL's variables on one node only",
        check="variables",
        found=("NCCL_IB_DISABLE is not the same on all ranks", "NCCL_IB_DISABLE=1", "NCCL_IB_DISABLE=unset"),
        lines=ON_2 + "export NCCL_IB_DISABLE=1",
    ),
    Fault(
        title="a clock that is a minute ahead (by a Python that adds it)",
        check="clock",
        found=("The clock of a node is wrong", "60 s ahead of", "node2"),
        lines=ON_2 + "export PYTHONPATH=$PWD/ahead:$PYTHONPATH",
    ),
)
SPEED = (
    Fault(
        title="a rank that computes three times as long (by a Python that does all matrix products thrice)",
        check="straggler",
        found=("A rank is slower than the others", "rank 3 (node2)", "--exclude=node2"),
        lines=RANK_3 + "export PYTHONPATH=$PWD/thrice:$PYTHONPATH",
        arguments=(),
    ),
)
SYN = "tcp flags & (syn|ack) == syn"
_TABLE = "nft add table inet doctor; nft 'add chain inet doctor in { type filter hook input priority 0; }'\n"
_NO_TABLE = "nft delete table inet doctor"


def _rule(words: str) -> str:
    return f"{_TABLE}nft 'add rule inet doctor in {words}'"


# Holds all ports of the range of node2, until the doctor of its first task ends.
_HOLD_PORTS = (
    ON_2
    + """if ((SLURM_LOCALID == 0)); then
  python -c 'import os, pathlib, socket, sys, time
doctor, path = os.getppid(), pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range")
before = path.read_text(); path.write_text("40000 40015")
held = []
for port in range(40000, 40016):
    try: held.append(socket.create_server(("", port)))
    except OSError: pass  # Slurm has taken one meanwhile
pathlib.Path("held").touch()
while os.getppid() == doctor: time.sleep(0.1)
path.write_text(before)' >held.out 2>&1 </dev/null &
fi
until [[ -e held ]]; do sleep 0.1; done"""
)

NETWORK = (
    Fault(
        title="a loopback interface that is down on rank 0's node",
        check="loopback",
        found=("A node can't connect to itself", "node1: ", "lo is down", "ip link set lo up"),
        on_nodes=(("node1", "ip link set lo down"),),
        undone=(("node1", "ip link set lo up"),),
    ),
    Fault(
        title="a loopback interface that is down on another node",
        check="loopback",
        found=("A node can't connect to itself", "node2: ", "ip link set lo up"),
        on_nodes=(("node2", "ip link set lo down"),),
        undone=(("node2", "ip link set lo up"),),
    ),
    Fault(
        title="an address that two nodes have",
        check="same_address",
        found=("Two nodes have the same address", "node1, node2: "),
        on_nodes=(("node2", "ip address add @node1/32 dev eth0"),),
        undone=(("node2", "ip address del @node1/32 dev eth0"),),
    ),
    Fault(
        title="no ports left on a node",
        check="free_ports",
        found=("No ports are left on a node", "node2: ", "40000 to 40015", "--exclude=node2"),
        lines=_HOLD_PORTS,
    ),
    Fault(
        title="a link that loses 45 % of the packets",
        check="packet_loss",
        found=("The network loses packets", "node1 -> node2"),
        on_nodes=(("node2", _rule("ip saddr @node1 numgen random mod 100 < 45 drop")),),
        undone=(("node2", _NO_TABLE),),
    ),
    Fault(
        title="a link that loses 30 % of the packets in both directions",
        check="packet_loss",
        found=("The network loses packets",),
        on_nodes=tuple(
            (node, _rule(f"ip saddr @{other} numgen random mod 100 < 30 drop"))
            for node, other in (("node1", "node2"), ("node2", "node1"))
        ),
        undone=(("node1", _NO_TABLE), ("node2", _NO_TABLE)),
    ),
    Fault(
        title="a name server that doesn't answer",
        check="did_not_return",
        found=("The check master_address (names) did not come back",),
        lines='read -r address _ < <(getent hosts node1); echo "nameserver $address" >resolv.$SLURM_PROCID\n'
        "mount --bind resolv.$SLURM_PROCID /etc/resolv.conf\nexport MASTER_ADDR=slow.example",
        arguments=("--quick", "--check-limit-s", "2", "--wait-s", "4"),
        on_nodes=(("node1", _rule("udp dport 53 drop")),),
        undone=(("node1", _NO_TABLE),),
    ),
    Fault(
        title="a firewall that drops the master's port",
        check="way_to_rank_0",
        found=("Ranks can't connect to rank 0's host, node1: filtered", "ranks 2-3 (node2)"),
        on_nodes=(("node1", _rule(f"{SYN} ip saddr @node2 tcp dport 10000-32767 drop")),),
        undone=(("node1", _NO_TABLE),),
    ),
    Fault(
        title="a firewall that rejects the master's port",
        check="way_to_rank_0",
        found=("Ranks can't connect to rank 0's host, node1: refused", "ranks 2-3 (node2)"),
        on_nodes=(("node1", _rule(f"{SYN} ip saddr @node2 tcp dport 10000-32767 reject with tcp reset")),),
        undone=(("node1", _NO_TABLE),),
    ),
    Fault(
        title="no route to rank 0's host",
        check="way_to_rank_0",
        found=("Ranks can't connect to rank 0's host, node1: no route",),
        on_nodes=(("node2", "ip route add unreachable @node1/32"),),
        undone=(("node2", "ip route del unreachable @node1/32"),),
    ),
    Fault(
        title="a firewall that opens the master's port only",
        check="links",
        found=("Nodes can't connect to others: filtered", "node1 -> node2"),
        on_nodes=(("node2", _rule(f"{SYN} ip saddr @node1 tcp dport 32768-60999 drop")),),
        undone=(("node2", _NO_TABLE),),
    ),
    Fault(
        title="a link that drops large packets (MTU)",
        check="large_packets",
        found=("Small messages pass between nodes, large ones hang", "node1 -> node2"),
        on_nodes=(("node2", _rule("ip saddr @node1 tcp sport 0-65535 meta length > 1000 drop")),),
        undone=(("node2", _NO_TABLE),),
    ),
    Fault(
        title="a link of 10 MB/s",
        check="slow_link",
        found=("The network between nodes is slow", "node1 -> node2"),
        lines=SOON,
        on_nodes=(
            (
                "node2",
                _rule("ip saddr @node1 meta length > 1000 limit rate over 10 mbytes/second burst 100 kbytes drop"),
            ),
        ),
        undone=(("node2", _NO_TABLE),),
    ),
)
IN_THE_BATCH_SHELL = (
    Fault(
        title="no srun",
        check="topology",
        found=("Starting rank 0 of 4 without srun", "srun python"),
    ),
    Fault(
        title="a step of one task in a job of four",
        check="one_task_step",
        found=("This step has 1 task, and the job has up to 4", "srun --ntasks=4"),
        options=("srun", "--nodes=1", "--ntasks=1", "--gres=gpu:1", "--overlap"),
    ),
)
"""Those that are made before all others, by the batch script itself. The options are the words before the doctor."""
ON_A_LOGIN_NODE = (
    Fault(
        title="a cluster.toml with an unknown key",
        check="cluster_toml",
        found=("partitoin", "Did you mean partition"),
        lines="echo 'partitoin = \"x\"' >cluster.toml",
        arguments=(),
    ),
    Fault(
        title="a cluster.toml that can't be read",
        check="cluster_toml",
        found=("cluster.toml",),
        lines="echo 'partition = ' >cluster.toml",
        arguments=(),
    ),
    Fault(
        title="a controller that can't be asked",
        check="slurm",
        found=("sinfo",),
        lines="unset SLURM_CONF",
        arguments=(),
    ),
    Fault(
        title="nodes without GPUs (by a sinfo that calls them something else)",
        check="partitions",
        found=("No partition has a usable node with GPUs", "main: 2 nodes, no GPU each"),
        lines="real=$(command -v sinfo); mkdir bin\n"
        'printf \'#!/bin/bash\\n%q "$@" | sed s/gpu:/nic:/g\\n\' "$real" >bin/sinfo\n'
        "chmod +x bin/sinfo; export PATH=$PWD/bin:$PATH",
        arguments=("--strict",),
    ),
    Fault(
        title="a run directory in memory",
        check="node_local",
        found=("other nodes may not see", "on tmpfs"),
        lines="mkdir memory && mount -t tmpfs -o size=2g none memory",
        arguments=("--strict", "--run-dir", "memory"),
    ),
    Fault(
        title="a full disk",
        check="run_folder",
        found=("it is full",),
        lines="mkdir full && mount -t tmpfs -o size=4k none full",
        arguments=("--run-dir", "full"),
    ),
    Fault(
        title="no data",
        check="data_folder",
        found=("The data is not on a node",),
        arguments=("--data-dir", "missing"),
    ),
    Fault(
        title="another Python than the activated environment's",
        check="other_environment",
        found=("Another Python runs",),
        lines="export VIRTUAL_ENV=$PWD",
        arguments=("--strict",),
    ),
    Fault(
        title="torch's CPU build on a cluster with GPUs",
        check="torch_build",
        found=("This torch has no GPU support", "GPUs here: 2"),
        lines="mkdir -p older/torch; touch older/torch/__init__.py\n"
        "printf \"__version__ = '1.0.0'\\ncuda = None\\n\" >older/torch/version.py\n"
        "export PYTHONPATH=$PWD/older:$PYTHONPATH; unset CLUSTER_DDP_DUMMY_GPUS",
        arguments=("--strict",),
    ),
    Fault(
        title="a low limit of open files",
        check="open_files",
        found=("ulimit -Hn: 200",),
        lines="ulimit -n 200",
        arguments=(),
    ),
)
"""Those of a login node. Warnings count there with --strict."""
PROMISED = (
    *("one task for two GPUs", "three tasks for two GPUs", "rank 0 never starts"),
    *("a MASTER_PORT that another program holds", "another MASTER_PORT in each task"),
    *("MASTER_ADDR=127.0.0.1 on two nodes", "GLOO_SOCKET_IFNAME names an interface that is not there"),
    *("a GLOO_DEVICE_TRANSPORT that this build of torch lacks", "data that is missing on one node"),
    "so low a limit of open files that the doctor's own checks can't run",
    *("a loopback interface that is down on rank 0's node", "an address that two nodes have"),
    *("no ports left on a node", "a link that loses 45 % of the packets", "a firewall that drops the master's port"),
)
"""The titles of those that README and docs/faults.md name: why a job can't start, such as ranks without a way."""
AT_ONCE = (*LAUNCH, *STARTS, *NAMES, *INTERFACES, *LIMITS, *FILES, *HANGS, *PYTHONS, *SPEED)
"""Those that concern one step only."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to run a sound training: the doctor must find nothing."""

    title: str
    options: tuple[str, ...] = ()
    """For srun."""
    before: tuple[str, ...] = ()
    """Words before the doctor."""
    launcher: tuple[str, ...] = ("python", "-m")
    """Words before the doctor's module."""
    arguments: tuple[str, ...] = ("--quick",)


TORCHRUN = ("python", "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d")
TORCHRUN += ("--rdzv-endpoint=node1:29876", "--rdzv-id=7", "-m")
CONTAINER = ("env", "-i", 'PATH="$PATH"', 'PYTHONPATH="$PYTHONPATH"', *(f'{name}="${name}"' for name in (
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES",
    "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_NODEID",
    "CLUSTER_DDP_DUMMY_GPUS",
)))  # fmt: skip
HEALTHY = (
    Variant(title="block distribution, all tiers", options=("--distribution=block",), arguments=()),
    Variant(title="cyclic distribution", options=("--distribution=cyclic",)),
    Variant(title="each task sees one GPU", options=("--gpus-per-task=1",)),
    Variant(title="one rank", options=("--nodes=1", "--ntasks-per-node=1", "--gres=gpu:1")),
    Variant(title="torchrun", options=("--ntasks-per-node=1",), launcher=TORCHRUN),
    Variant(title="a container with some of Slurm's variables", before=CONTAINER),
    Variant(title="a step on part of the nodes", options=("--nodes=1", "--ntasks-per-node=2", "--nodelist=node2")),
    Variant(
        title="CPUs that differ from node to node",
        options=("--cpus-per-task=1",),
        before=("$([[ $SLURMD_NODENAME == node1 ]] || echo taskset -c 0,1)",),
    ),
    Variant(title="rank 0 starts 12 s later", before=("((SLURM_PROCID)) || sleep 12;",)),
    Variant(
        title="torch that takes seconds to import",
        options=("--nodes=1", "--ntasks-per-node=2"),
        before=('PYTHONPATH="$PWD/slow:$PYTHONPATH"',),
        arguments=(),
    ),
)
"""Two tasks of an array, which run at once on the same nodes, are jobs of their own in test_doctor.py."""
