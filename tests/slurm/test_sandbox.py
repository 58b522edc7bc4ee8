"""The sandbox itself: that it is one, that two don't meet, and that nothing is left of it."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from chaos import disk, faults
from cluster import Cluster, sandbox_name, skip_without_slurm
from slowness import LIMIT_S, scaled, wait_until

from cluster_ddp.errors import ClusterDDPError, SandboxError
from cluster_ddp.sandbox import cluster, daemons, network, prerequisites, slurm_download
from cluster_ddp.sandbox.layout import STATE_ROOT
from cluster_ddp.slurm import commands

NAME = sandbox_name("own")


def traces() -> set[str]:
    """All that these tests' sandbox has on this machine: links, namespaces, a folder, processes."""
    namespaces = [path.name for path in network.NAMESPACE_ROOT.glob(f"cddp.{NAME}.*")]
    folders = [path.name for path in STATE_ROOT.glob(NAME)]
    processes = [f"{pid} {command(pid)}" for pid in network.processes(NAME)]
    numbers = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    reapers = [f"{pid} {command(pid)}" for pid in numbers if f"cluster_ddp.sandbox.cluster {NAME} " in command(pid)]
    return {*network.interfaces(NAME), *namespaces, *folders, *processes, *reapers}


def command(pid: int) -> str:
    """The command line of a process, empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@pytest.fixture(autouse=True)
def _nothing_is_left(slurm: Cluster) -> Iterator[None]:
    """After each test the machine is as before it."""
    hosts = Path("/etc/hosts").read_bytes()
    yield
    assert traces() == set()
    assert Path("/etc/hosts").read_bytes() == hosts


def door(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cluster_ddp.sandbox", *arguments],
        capture_output=True,
        text=True,
        timeout=scaled(LIMIT_S),
    )


@pytest.mark.full
def test_a_second_sandbox_beside_the_first(slurm: Cluster) -> None:
    done = door("up", "--name", NAME, "--nodes", "2", "--gpus-per-node", "0")
    cluster.keep(NAME)  # from here on it ends with these tests
    try:
        assert done.returncode == 0, done.stderr
        assert "2 nodes with 0 GPUs each" in done.stdout
        assert len(network.interfaces(NAME)) == 4  # the bridge, the controller's link, two nodes'
        again = door("up", "--name", NAME)
        assert (again.returncode, "a sandbox of that name exists already" in again.stderr) == (2, True)
        config = door("run", "--name", NAME, "--", "scontrol", "show", "config").stdout
        assert re.search(r"MessageTimeout +=\s+60 sec", config)  # else orders to a busy node may come twice
        assert re.search(r"UnkillableStepTimeout +=\s+300 sec", config)  # else a node that was cut off may be drained
        where = "hostname; cat /proc/net/fib_trie | grep -o '10\\.213\\.[0-9]*\\.1[0-9]' | head -n 1"
        run = door("run", "--name", NAME, "--", "srun", "--nodes=2", "bash", "-c", where)
        lines = run.stdout.split()
        assert {"node1", "node2"} <= set(lines), run.stderr
        assert len({line for line in lines if line.startswith("10.")}) == 2
        assert {*slurm.run("srun", "--nodes=4", "hostname").stdout.split()} == {f"node{i}" for i in range(1, 5)}
        status = door("status", "--name", NAME).stdout
        assert status.splitlines()[:2] == ["node1      idle", "node2      idle"]
        record = json.loads(door("status", "--name", NAME, "--json").stdout)
        assert record == {"nodes": {"node1": "idle", "node2": "idle"}, "jobs": []}
        missing = door("run", "--name", NAME, "--", "nosuch", "a b")
        assert (missing.returncode, missing.stderr) == (
            2,
            "cluster-ddp sandbox: error: Running nosuch 'a b' on the login node:\n  No such file or directory.\n"
            "  Hint: your shell must find it, too: type nosuch\n",
        )
        assert door("run", "--name", NAME, "--", "sh", "-c", "exit 7").returncode == 7
    finally:
        assert door("down", "--name", NAME).returncode == 0
    assert "did not exist" in door("down", "--name", NAME).stdout


def test_a_node_that_came_back_takes_a_step_at_once(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its slurmd is slow to start, as on a busy machine."""
    slow = tmp_path / "slurmd"
    slow.write_text(f'#!/bin/sh\nsleep 5\nexec {shutil.which("slurmd")} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    faults.lose_node(slurm.layout, "node2")
    faults.bring_back_node(slurm.layout, "node2")
    done = slurm.run("srun", "--nodelist=node2,node3", "hostname")
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["node2", "node3"]), done.stderr


@pytest.mark.full
def test_a_node_that_is_cut_is_given_up_and_takes_a_step_when_it_is_back(slurm: Cluster) -> None:
    """Its job has ended by then, and no task of it lives on there."""

    def sleeps() -> bool:
        return any(command(pid).endswith("/sleep 3600 ") for pid in faults.processes_on(slurm.layout, "node2"))

    argv = ("srun", "--nodelist=node2", "--time=5", "/bin/sleep", "3600")
    with subprocess.Popen(argv, env=slurm.env, stderr=subprocess.PIPE, text=True) as job:
        wait_until(lambda: sleeps() or job.poll() is not None)
        faults.cut_node(slurm.layout, "node2")
        _, said = job.communicate(timeout=scaled(LIMIT_S))
    assert (job.returncode != 0, "node failure" in said.lower(), sleeps()) == (True, True, False), said
    done = slurm.run("srun", "--nodelist=node2,node3", "hostname")
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["node2", "node3"]), done.stderr


@pytest.mark.full
def test_another_slurm_beside_the_systems() -> None:
    """Daemons, commands and what a job calls are all of that release; the system's are as they were."""
    version = slurm_download.NEWEST
    try:
        slurm_download.fetch(version)
    except SandboxError as error:
        skip_without_slurm(error)
    systems = shutil.which("srun")
    done = door("up", "--name", NAME, "--nodes", "2", "--slurm-version", version)
    cluster.keep(NAME)
    try:
        assert done.returncode == 0, done.stderr
        ask = "slurmd -V; scontrol show config | grep SLURM_VERSION; echo $CUDA_VISIBLE_DEVICES"
        run = door("run", "--name", NAME, "--", "srun", "--nodes=2", "--gres=gpu:2", "bash", "-c", ask)
        versions = re.findall(r"\d+\.\d+(?=\.\d)", run.stdout)
        assert (versions, run.stdout.count("0,1")) == ([version] * 4, 2), run.stderr
    finally:
        assert door("down", "--name", NAME).returncode == 0
    assert shutil.which("srun") == systems


def test_a_release_that_cannot_be_fetched_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prerequisites.install(("patchelf",), ("patchelf",))  # by apt-get, which would not come through either
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    done = door("up", "--name", NAME, "--slurm-version", slurm_download.NEWEST)
    assert done.returncode == 2
    assert f"Downloading Slurm {slurm_download.NEWEST} from " in done.stderr
    assert "Could not connect to 127.0.0.1:9" in done.stderr
    assert list(tmp_path.rglob("*")) == [tmp_path / "cluster_ddp"]


def test_a_disk_is_full_and_then_blocked(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with ExitStack() as stack:
        try:
            stack.enter_context(disk.mounted(folder, size_mb=16))
        except SandboxError as error:
            pytest.skip(str(error))
        disk.fill(folder)
        with pytest.raises(OSError, match="No space left on device"):
            (folder / "file").write_bytes(bytes(1 << 16))
        disk.empty(folder)
        (folder / "file").write_bytes(bytes(1 << 16))
        times, ended = [time.monotonic()], threading.Event()

        def write() -> None:
            while not ended.wait(0.05):
                (folder / "file").write_bytes(b"again")
                times.append(time.monotonic())

        writer = threading.Thread(target=write)
        writer.start()
        disk.block(folder, for_s=2)
        ended.set()
        writer.join()
        assert max(later - earlier for earlier, later in itertools.pairwise([*times, time.monotonic()])) > 1.5
    assert not (tmp_path / "disk.img").exists() and not folder.is_mount()


def test_down_after_a_crash_with_a_job_running() -> None:
    """Daemons killed, the state lost, a job's processes still there."""
    cluster.up(NAME, nodes=1, gpus_per_node=1)
    try:
        env = cluster.environment(NAME)
        commands.run(["sbatch", "--output=/dev/null", "--wrap", "trap '' TERM; sleep 86400"], env=env)
        wait_until(lambda: any(command(pid).startswith("sleep 86400") for pid in network.processes(NAME)))
        for pid in network.processes(NAME):
            if command(pid).startswith(("slurmctld", "slurmd")):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(STATE_ROOT / NAME)
    finally:
        assert cluster.down(NAME)


@pytest.mark.fault(
    "`make test`, `make demo` or `make chaos` is killed",
    "its sandbox ends with it: daemons, namespaces, links (Linux 5.3)",
    bound="seconds",
)
@pytest.mark.parametrize("begun", [False, True], ids=["while it starts", "once it is up"])
def test_it_ends_with_the_process_that_wants_it(begun: bool) -> None:
    """Killed, at any time: nobody could take away what it has started, and daemons and namespaces would stay."""
    wanted = f"from cluster_ddp.sandbox import cluster; cluster.up({NAME!r}, nodes=1, gpus_per_node=0); input()"
    process = subprocess.Popen([sys.executable, "-c", wanted], stdin=subprocess.PIPE, start_new_session=True)
    try:
        wait_until(lambda: len(network.processes(NAME)) >= (4 if begun else 1) and (not begun or is_idle()))
        process.kill()
        process.communicate()
        wait_until(lambda: not traces(), said=traces)
    finally:
        process.kill()
        process.wait()
        cluster.down(NAME)


def is_idle() -> bool:
    try:
        return daemons.node_states(cluster.environment(NAME)) == {"node1": "idle"}
    except ClusterDDPError:
        return False


def test_ctrl_c_is_the_commands_own(slurm: Cluster) -> None:
    """A terminal sends it to both, and the command says what it says: no traceback, and its own exit status."""
    lines = "trap 'echo interrupted; exit 9' INT; echo ready; while :; do sleep 0.1; done"
    argv = [sys.executable, "-m", "cluster_ddp.sandbox", "run", "--name", slurm.name, "--", "bash", "-c", lines]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(argv, **streams, text=True, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGINT)
        said, complaint = process.communicate(timeout=scaled(LIMIT_S))
    assert (process.returncode, said, complaint) == (9, "interrupted\n", "")


def test_an_up_that_fails_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "slurmctld"
    broken.write_text("#!/bin/sh\necho this slurmctld is broken >&2; exit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxError, match="this slurmctld is broken"):
        cluster.up(NAME, nodes=2, gpus_per_node=1)


@pytest.mark.parametrize(
    ("arguments", "mentioned"),
    [
        (("up", "--name", "a b"), "letters, digits and '-'"),
        (("up", "--name", "../x"), "letters, digits and '-'"),
        (("up", "--name", NAME, "--nodes", "0"), "--nodes 0"),
        (("up", "--name", NAME, "--gpus-per-node", "99"), "--gpus-per-node 99"),
        (("up", "--name", NAME, "--slurm", "/nowhere"), "not in its bin or sbin: slurmctld, slurmd, sbatch, srun"),
        (("run", "--name", NAME, "--", "true"), "it is not up"),
        (("status", "--name", NAME), "it is not up"),
        (("shell", "--name", NAME), "it is not up"),
        (("down", "--name", "/"), "letters, digits and '-'"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], mentioned: str) -> None:
    done = door(*arguments)
    assert done.returncode == 2
    assert mentioned in done.stderr
    assert "Hint:" in done.stderr


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SandboxError, match="it needs root"):
        cluster.up(NAME, nodes=1, gpus_per_node=0)


def test_without_slurm_it_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="slurmctld") as caught:
        prerequisites.require()
    assert "--install" in caught.value.hint
    with pytest.raises(SandboxError, match=r"only as root on Debian and Ubuntu \(apt-get\)"):
        prerequisites.install()
