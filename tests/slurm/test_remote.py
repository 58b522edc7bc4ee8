"""`--on HOST`: a project is copied to a cluster behind a real sshd, and the verbs run there."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import TIMEOUT_S, Cluster, skip_without_slurm
from slowness import scaled

from cluster_ddp.errors import SandboxError
from cluster_ddp.sandbox import network, prerequisites

pytestmark = pytest.mark.full


@dataclass(frozen=True)
class Laptop:
    """A machine without Slurm, with a project, from which the cluster's node1 is reached by ssh."""

    folder: Path
    env: dict[str, str]
    there: Path
    """The copy's folder on node1."""

    def run(self, *words: str, on: str = "", cwd: str = "it's mine/sub dir") -> subprocess.CompletedProcess[str]:
        """Run a verb from a folder of the project."""
        verb, *rest = words
        command = [sys.executable, "-m", "cluster_ddp", verb, "--on", on or f"cluster:{self.there}", *rest]
        return subprocess.run(
            command,
            cwd=self.folder / cwd,
            env=self.env,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=scaled(TIMEOUT_S),
        )

    def refused(self, *words: str, on: str = "") -> str:
        """Run a verb, which must be refused. Its message."""
        done = self.run(*words, on=on)
        assert done.returncode == 2, done
        assert "Traceback" not in done.stderr
        return done.stderr


@pytest.fixture
def sshd(slurm: Cluster, tmp_path: Path) -> Iterator[Path]:
    """An sshd on node1. The folder with a configuration for ssh(1) that knows it as "cluster"."""
    try:
        prerequisites.install(("sshd", "rsync"), ("openssh-server", "rsync"))
    except SandboxError as error:
        skip_without_slurm(error)
    folder = tmp_path / "ssh"
    folder.mkdir(mode=0o700)
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    address = next(address for address, host in slurm.layout.hosts_by_address.items() if host == "node1")
    (folder / "sshd_config").write_text(
        f"ListenAddress {address}\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/user_key.pub\n"
        f"StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin yes\nPrintMotd yes\n"
        f"SetEnv SLURM_CONF={slurm.env['SLURM_CONF']}\n"
    )
    (folder / "config").write_text(
        f"Host cluster broken\n  HostName {address}\n  IdentityFile {folder}/user_key\n  BatchMode yes\n"
        f"  UserKnownHostsFile {folder}/known_hosts\n  StrictHostKeyChecking accept-new\n"
        f"Host broken\n  Port 1\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    command = network.enter(slurm.layout, "node1", ["/usr/sbin/sshd", "-D", "-e", "-f", str(folder / "sshd_config")])
    with (folder / "log").open("w") as log:
        daemon = subprocess.Popen(command, stdout=log, stderr=log)
    deadline = time.monotonic() + scaled(30)
    while True:
        try:
            socket.create_connection((address, 22), timeout=1).close()
            break
        except OSError:
            assert time.monotonic() < deadline and daemon.poll() is None, (folder / "log").read_text()
            time.sleep(0.1)
    yield folder
    daemon.terminate()
    daemon.wait()


@pytest.fixture
def laptop(sshd: Path, tmp_path: Path) -> Laptop:
    """Its ssh uses the configuration of the fixture; its Slurm is not this cluster's."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {shlex.quote(str(sshd / "config"))} "$@"\n')
    (programs / "ssh").chmod(0o755)
    project = tmp_path / "it's mine"
    (project / "sub dir").mkdir(parents=True)
    (project / "sub dir" / "hello.py").write_text("import helper, os\nprint('hello from rank', os.environ['RANK'])\n")
    (project / "sub dir" / "helper.py").write_text("")
    (project / "old ü.py").write_text("")
    (project / ".gitignore").write_text("data/\nruns/\n.venv/\n")
    (project / "data").mkdir()
    (project / "data" / "local").write_text("")
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    there = tmp_path / "it's there"
    (there / ".venv" / "bin").mkdir(parents=True)
    program = there / ".venv" / "bin" / "cluster-ddp"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m cluster_ddp "$@"\n')
    program.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    return Laptop(tmp_path, {**env, "PATH": f"{programs}:{env['PATH']}"}, there)


def test_a_project_is_copied_submitted_followed_and_fetched(laptop: Laptop) -> None:
    done = laptop.run("submit", "--watch", "--name", "first", "--gpus-per-node", "2", "--", "python", "hello.py")
    assert done.returncode == 0, done
    assert "hello from rank 0" in done.stdout and "hello from rank 1" in done.stdout
    assert (
        f"This was on cluster:{laptop.there}. There: cluster-ddp logs --on cluster:{laptop.there} -f JOB" in done.stderr
    )
    assert (laptop.there / "old ü.py").exists()
    assert not (laptop.there / "data").exists(), "git ignores it"
    run_dir = (laptop.there / "sub dir" / "runs" / "latest").resolve()
    label = json.loads((run_dir / "job.json").read_text())["job"]

    assert "COMPLETED" in laptop.run("status").stdout
    assert "hello from rank 1" in laptop.run("logs", label, "--rank", "1").stdout
    assert "it has ended already: COMPLETED" in laptop.refused("cancel", label)

    checkpoint = laptop.there / "sub dir" / "runs" / f"first-{label}" / "checkpoints" / "x.pt"
    checkpoint.parent.mkdir()
    checkpoint.write_text("")
    here = laptop.folder / "it's mine" / "sub dir" / "runs" / run_dir.name
    done = laptop.run("fetch", label)
    assert (done.returncode, done.stdout) == (0, f"Fetched runs/{run_dir.name}\n"), done.stderr
    assert "hello from rank 0" in (here / "task-0.log").read_text()
    assert not (here / "checkpoints").exists()
    assert laptop.run("fetch", label, "--checkpoints").returncode == 0
    assert (here / "checkpoints" / "x.pt").exists()
    (here / ".cluster-ddp-copy.json").unlink()
    assert "there is another run of that name." in laptop.refused("fetch", label)


def test_a_second_copy_has_what_changed_and_deletes_only_what_it_had(laptop: Laptop) -> None:
    dry = ("submit", "--dry-run", "--", "python", "hello.py")
    done = laptop.run(*dry)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --job-name=hello" in done.stdout
    (laptop.there / "data").mkdir()
    (laptop.there / "data" / "theirs").write_text("")
    (laptop.there / "sub dir" / "notes").write_text("made there")
    (laptop.folder / "it's mine" / "old ü.py").unlink()
    (laptop.folder / "it's mine" / "sub dir" / "helper.py").write_text("changed = True")
    assert laptop.run(*dry).returncode == 0
    assert not (laptop.there / "old ü.py").exists()
    assert (laptop.there / "sub dir" / "helper.py").read_text() == "changed = True"
    assert (laptop.there / "data" / "theirs").exists() and (laptop.there / "sub dir" / "notes").exists()


def test_what_is_missing_there_is_named(laptop: Laptop) -> None:
    assert "nothing was submitted to it from" in laptop.refused("status")
    (laptop.folder / "other").mkdir()
    (laptop.folder / "other" / "file").write_text("")
    said = laptop.refused("submit", "--", "true", on=f"cluster:{laptop.folder}/other")
    assert "the folder has other files already." in said
    assert [path.name for path in (laptop.folder / "other").iterdir()] == ["file"]
    said = laptop.refused("submit", "--", "true", on="broken")
    assert "Connection refused" in said and "Hint: try it by hand: ssh broken" in said
    (laptop.there / ".venv" / "bin" / "cluster-ddp").unlink()
    said = laptop.refused("submit", "--", "true")
    assert f"it is neither in {laptop.there}/.venv/bin nor on the PATH of a login shell." in said
    assert "python3 -m venv .venv && .venv/bin/pip install PATH_OF_ITS_CHECKOUT" in said


def test_the_name_of_a_run_directory_is_no_option_and_no_machine(laptop: Laptop) -> None:
    """Whoever can write to the folder of the runs names them; --to . puts the name first in rsync's argument."""
    assert laptop.run("submit", "--local", "--", "true").returncode == 0
    runs = laptop.there / "sub dir" / "runs"
    names = ["-etouch owned", "broken:x", "a\nb", "--rsync-path=touch owned"]
    for name in names:
        (runs / name).mkdir()
        (runs / name / "run.json").write_text(json.dumps({"name": name}))
    for name in names:
        done = laptop.run("fetch", "--to", ".", f"runs/{name}")
        assert done.returncode == 0, done.stderr
        here = laptop.folder / "it's mine" / "sub dir"
        assert json.loads((here / name / "run.json").read_text()) == {"name": name}
    assert not list(laptop.folder.rglob("owned"))


def test_a_copy_runs_as_nobody_and_is_its_fetchers_alone(laptop: Laptop) -> None:
    """The owner of a run directory on the cluster chooses its modes: a copy with set-user-ID would run as us."""
    assert laptop.run("submit", "--local", "--", "true").returncode == 0
    run_dir = laptop.there / "sub dir" / "runs" / "foreign"
    run_dir.mkdir()
    for name, mode in (("run.json", 0o666), ("program", 0o6777), (".", 0o2777)):
        if name != ".":
            (run_dir / name).write_text("{}")
        os.chown(run_dir / name, 65533, 65533)
        (run_dir / name).chmod(mode)
    done = laptop.run("fetch", "--to", ".", "runs/foreign")
    assert done.returncode == 0, done.stderr
    copy = laptop.folder / "it's mine" / "sub dir" / "foreign"
    seen = {name: (copy / name).lstat() for name in (".", "run.json", "program")}
    assert {name: oct(one.st_mode & 0o7777) for name, one in seen.items()} == {
        ".": "0o755",
        "run.json": "0o644",
        "program": "0o755",
    }
    assert {(one.st_uid, one.st_gid) for one in seen.values()} == {(os.geteuid(), os.getegid())}
