"""--stage-env on a node whose disk others can write: the scripts' own text, as an unprivileged user, without Slurm."""

from __future__ import annotations

import os
import shlex
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster_ddp.submission.task_command import of_command
from strangers import USER, as_stranger, folder_of_all, needs_a_stranger

from cluster_ddp.submission.render import _rendered
from cluster_ddp.submission.spec import JobSpec

pytestmark = needs_a_stranger
SRUN = '#!/bin/sh\nwhile [ "$1" != bash ]; do shift; done\nexec "$@"\n'


@dataclass
class Node:
    """A folder that everybody can write, and an environment of the user's that says where its Python is."""

    disk: Path
    venv: Path
    archive: Path

    def run(self, *parts: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run parts of the job as the user: "stage_env", and "task", which calls the environment's Python."""
        spec = JobSpec(name="x", command=("python",), venv=str(self.venv), stage_env=True)
        values = {"spec": spec, "task": of_command(spec), "venv_archive": str(self.archive)}
        texts = {part: _rendered(f"{part}.sh.j2", **values) for part in parts}
        if "task" in texts:
            texts["task"] = f"PATH={self.venv}/bin:$PATH bash -c {shlex.quote(texts['task'])} bash python"
        env = {"SLURM_TMPDIR": str(self.disk), "SLURM_JOB_ID": "7", "SLURM_NODEID": "0", **env}
        path = f"{self.venv}/bin:/usr/bin:/bin"
        more = {"SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": "here", "PATH": path, "RANK": "0"}
        return as_stranger("bash", "-c", "\n".join(texts.values()), user=USER, **{**more, **env})


@pytest.fixture
def node() -> Iterator[Node]:
    with folder_of_all() as disk, folder_of_all(0o755) as home:
        os.chown(home, USER, USER)
        venv = home / "venv"
        (venv / "bin").mkdir(parents=True)
        for name, text in (("python", '#!/bin/sh\necho "$0"\n'), ("srun", SRUN)):
            (venv / "bin" / name).write_text(text)
            (venv / "bin" / name).chmod(0o755)
        with tarfile.open(home / "env.tar", "w") as tar:
            tar.add(venv, arcname=".")
        for path in (home, *home.rglob("*")):
            os.chown(path, USER, USER)
        yield Node(disk, venv, home / "env.tar")


def test_a_copy_is_made_used_and_removed(node: Node) -> None:
    done = node.run("stage_env", "task")
    assert done.stdout.splitlines()[-1].startswith(f"{node.disk}/cluster_ddp-env-7-"), done
    assert list(node.disk.iterdir()) == []


def test_a_link_under_the_copys_name_is_not_followed(node: Node) -> None:
    """A stranger learns the name while the copy exists, and takes it when the disk is full and the copy removed."""
    for name in ("cluster_ddp-env-7-0", "known-0"):  # the first is the name that copies once had
        assert as_stranger("ln", "-s", node.venv, node.disk / name).returncode == 0
    done = node.run("task", CLUSTER_DDP_COPY="known")
    assert done.stdout == f"{node.venv}/bin/python\n", done


def test_names_that_copies_once_had_are_of_no_use(node: Node) -> None:
    assert as_stranger("ln", "-s", node.venv, node.disk / "cluster_ddp-env-7-0").returncode == 0
    done = node.run("stage_env", "task")
    assert done.stdout.splitlines()[-1].startswith(f"{node.disk}/cluster_ddp-env-7-"), done
    assert not done.stdout.splitlines()[-1].startswith(f"{node.disk}/cluster_ddp-env-7-0"), done


@pytest.mark.parametrize("how", ["a stranger's", "missing", "a link to a stranger's", "a named pipe"])
def test_an_archive_that_is_not_ours_is_not_unpacked(node: Node, how: str) -> None:
    planted = node.disk / "env.tar"
    assert as_stranger("cp", node.archive, planted).returncode == 0
    if how == "missing":
        node.archive.unlink()
    elif how == "a stranger's":
        node.archive = planted
    elif how == "a named pipe":  # opening it would wait for ever
        node.archive = node.disk / "pipe"
        assert as_stranger("mkfifo", node.archive).returncode == 0
    else:
        node.archive.unlink()
        node.archive.symlink_to(planted)
    done = node.run("stage_env", "task")
    assert "is not a file of yours" in done.stderr
    assert done.stdout == f"{node.venv}/bin/python\n", done
    assert {path.name for path in node.disk.iterdir()} <= {"env.tar", "pipe"}
