"""A cluster with accounts, limits and a database, where a partition must be named: the first hour, refusals, waits."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, sandbox_name, skip_without_slurm
from slowness import wait_until

from cluster_ddp.errors import JobNotFoundError, SandboxError
from cluster_ddp.sandbox import accounting, cluster, prerequisites
from cluster_ddp.slurm import commands, job_status, partitions

pytestmark = pytest.mark.full

SCRIPT = """import os, time
print("rank", os.environ["RANK"], "charged to", os.environ["SLURM_JOB_ACCOUNT"])
while os.path.exists("hold"):
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def accounted(machine: None) -> Iterator[Cluster]:
    """A sandbox of its own."""
    name = sandbox_name("acct")
    try:
        prerequisites.install(accounting.PROGRAMS, accounting.PACKAGES)
        layout = cluster.up(name, nodes=2, gpus_per_node=2, with_accounting=True)
    except SandboxError as error:
        skip_without_slurm(error)
    env = cluster.environment(name)
    try:
        yield Cluster(layout, {**env, "PATH": f"{Path(sys.executable).parent}:{env['PATH']}"})
    finally:
        cluster.down(name)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "it's a project"
    folder.mkdir()
    (folder / "my_train.py").write_text(SCRIPT)
    return folder


def run(accounted: Cluster, project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return accounted.run(sys.executable, "-m", "cluster_ddp", *words, cwd=project)


def said(accounted: Cluster, project: Path, *words: str) -> str:
    done = run(accounted, project, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_accounts_of_a_user_and_of_a_partition(accounted: Cluster) -> None:
    default, *others = partitions.accounts_of("root", env=accounted.env)
    assert (default, {*others}) == ("guest", {"lab", "small", "root"})
    main, urgent = (partitions.access(name, env=accounted.env) for name in ("main", "urgent"))
    assert (main.allowed, urgent.allowed) == ({"lab", "small"}, frozenset())
    assert [main.names("Lab"), main.names("guest"), urgent.names("guest")] == [True, False, True]


def test_the_first_hour(accounted: Cluster, project: Path) -> None:
    """init, watch, logs, status, cancel: partition and account are chosen once."""
    written = said(accounted, project, "init", "my_train.py", "--yes")
    assert "Written: cluster.toml" in written
    settings = (project / "cluster.toml").read_text()
    assert 'partition = "main"' in settings and 'account = "lab"' in settings
    assert "#   main: 2 nodes with 2 GPUs, 8 CPUs, 15G of memory; no time limit" in settings
    watched = said(accounted, project, "submit", "--gpus-per-node", "2", "--watch", "--", "python", "my_train.py")
    assert {"rank 0 charged to lab", "[task-1] rank 1 charged to lab"} <= {*watched.splitlines()}
    assert re.search(r"^job \d+: COMPLETED", watched, re.MULTILINE)
    assert "rank 0 charged to lab" in said(accounted, project, "logs", "runs/latest")
    job = accounted.run("sbatch", "--parsable", "my_train.sbatch", cwd=project).stdout.strip()
    (project / "hold").touch()
    submitted = said(accounted, project, "submit", "--", "python", "my_train.py")
    folder = re.search(r"Run directory: (\S+)", submitted)[1]
    link = re.search(r"To end it: cluster-ddp cancel (\S+)", submitted)[1]
    assert (project / link).resolve() == (project / folder).resolve()
    assert "Cancelled job" in said(accounted, project, "cancel", link)
    (project / "hold").unlink()
    wait_until(lambda: "CANCELLED" in said(accounted, project, "status"), pause_s=0.3)
    assert re.search(r"^\d+ +my_train +COMPLETED", said(accounted, project, "status"), re.MULTILINE)
    charged = ("sacct", "--noheader", "--format=account", "--allocations", f"--jobs={job}")
    # slurmctld tells slurmdbd in a while.
    wait_until(lambda: accounted.run(*charged).stdout.split() == ["lab"], pause_s=0.3)


def test_a_chain_that_is_longer_than_the_account_may_have(accounted: Cluster, project: Path) -> None:
    """Slurm counts each of its jobs as submitted."""
    change = ("sacctmgr", "--immediate", "modify", "user", "where", "user=root", "account=lab", "set")
    chain = ("submit", "--partition=main", "--account=lab", "--chain", "--", "python", "my_train.py")
    commands.run([*change, "MaxSubmitJobs=5"], env=accounted.env)
    try:
        refused = run(accounted, project, *chain)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "A chain of up to 21 jobs:\n  your account may have 5 jobs in the queue" in refused.stderr
        assert "Hint: --max-requeues 4" in refused.stderr
        unchecked = run(accounted, project, "submit", "--no-check", *chain[1:])
        assert "MaxSubmitJob" in unchecked.stderr and "allows fewer jobs in the queue" in unchecked.stderr
        assert "COMPLETED" in said(accounted, project, *chain[:-3], "--max-requeues=4", "--watch", *chain[-3:])
    finally:
        commands.run([*change, "MaxSubmitJobs=-1"], env=accounted.env)


REFUSED = [
    ((), "No partition specified or system default partition", "This cluster has no default partition. Name one with"),
    (("--partition=main", "--account=labb"), "Invalid account or account/partition", "--account lab or small"),
    (
        ("--partition=main", "--account=lab", "--qos=fast"),
        "Invalid qos specification",
        "Hint: name one of yours: --qos",
    ),
]


@pytest.mark.parametrize(("options", "found", "hint"), REFUSED)
def test_what_slurm_refuses_is_said_with_what_would_do(
    accounted: Cluster, project: Path, options: tuple[str, ...], found: str, hint: str
) -> None:
    done = run(accounted, project, "submit", *options, "--", "python", "my_train.py")
    assert done.returncode == 2 and done.stdout == ""
    assert found in done.stderr and hint in done.stderr
    assert not (project / "runs").exists() or not list((project / "runs").iterdir())


WAITING = [
    (("--account=guest",), "not permitted to use this partition", "Resubmit with another --account"),
    (("--account=small", "--nodes=2", "--gpus-per-node=2"), "AssocGrpGRES", "use as many GPUs as they may"),
    (("--account=lab", "--qos=short", "--time=60"), "QOSMaxWallDurationPerJobLimit", "allows no more run time"),
]


def test_what_slurm_lets_wait_is_explained(accounted: Cluster, project: Path) -> None:
    """An account that may not use the partition is warned of before."""
    for options, _, _ in WAITING:
        done = run(accounted, project, "submit", "--partition=main", *options, "--", "python", "my_train.py")
        assert done.returncode == 0, done.stderr
        warned = "The partition main does not name the account guest among those that may use it" in done.stderr
        assert warned is ("--account=guest" in options)
    shown = functools.partial(said, accounted, project, "status")
    reasons = [reason for _, reason, _ in WAITING]
    wait_until(lambda: all(map(shown().__contains__, reasons)), said=shown, pause_s=0.3)
    assert all(words in shown() for *_, words in WAITING), shown()
    commands.run(["scancel", "--user=root"], env=accounted.env)


def test_a_job_that_slurmctld_has_forgotten_is_in_the_accounting(accounted: Cluster, project: Path) -> None:
    twice = "((${SLURM_RESTART_COUNT:-0})) && exit 3; exit 75"
    words = ("--partition=main", "--account=lab", "--watch", "--", "bash", "-c", twice)
    done = run(accounted, project, "submit", *words)
    assert done.returncode == 3, done.stdout + done.stderr
    job = re.search(r"Submitted job (\d+)", done.stdout)[1]
    wait_until(lambda: accounted.run("scontrol", "show", "job", job).returncode, pause_s=1)
    (status,) = job_status.job_statuses(job, env=accounted.env)
    assert (status.state, status.exit_code, status.restarts) == ("FAILED", 3, 1)
    assert re.search(rf"^{job} +bash +FAILED +00:0", said(accounted, project, "status"), re.MULTILINE)
    with pytest.raises(JobNotFoundError):
        job_status.job_statuses("99999", env=accounted.env)


def test_a_program_that_is_missing_is_named(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "PROGRAMS", ("slurmdbd", "no-such-database"))
    with pytest.raises(
        SandboxError, match=r"not on this machine: no-such-database(.|\n)*apt-get install slurmdbd mariadb"
    ):
        cluster.up(sandbox_name("none"), nodes=1, gpus_per_node=0, with_accounting=True)
