"""Somebody else's processes on the same cluster, who know everything of a job but its secret."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from cluster import ROOT, Cluster, Place, output
from slowness import LIMIT_S, scaled, stays

from cluster_ddp.slurm import commands
from cluster_ddp.submission.spec import JobSpec

# The rank that comes late waits until the stranger has been there for a while.
VICTIM = """import os, pathlib, sys, time
late, go = sys.argv[1:]
while os.environ["SLURM_PROCID"] == late and not pathlib.Path(go).exists():
    time.sleep(0.1)
import runpy
runpy.run_path({hello!r}, run_name="__main__")
"""
# It has this package, and the place of a rank of that job: all but the secret.
STRANGER = """import os, sys
rank, job, *nodes = sys.argv[1:]
for name in [name for name in os.environ if name.startswith(("SLURM_", "CLUSTER_DDP_"))]:
    del os.environ[name]
os.environ.update(
    SLURM_JOB_ID=job, SLURM_STEP_ID="0", SLURM_PROCID=rank, SLURM_LOCALID="0", SLURM_NODEID=rank,
    SLURM_STEP_NUM_TASKS="2", SLURM_STEP_NUM_NODES="2", SLURM_STEP_TASKS_PER_NODE="1(x2)",
    SLURM_STEP_NODELIST=",".join(nodes),
)
from cluster_ddp import Topology
from cluster_ddp.runtime.rendezvous import store
print("trying", flush=True)
store.meet(Topology.from_environ(os.environ), "cpu", timeout_s=20)
print("IN", flush=True)
"""
# Leaves the secret where this test finds it; the first start is stopped in time, as if it had been warned.
NOTE = """import os, pathlib, sys
restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
pathlib.Path(sys.argv[1], f"{os.environ['RANK']}.{restarts}").write_text(os.environ["CLUSTER_DDP_SECRET"])
import cluster_ddp
with cluster_ddp.distributed() as world:
    world.print("".join(world.gather("met ")))
    world.barrier()
    if not restarts:
        raise SystemExit(75)
"""


@pytest.mark.fault(
    "a stranger who knows all but the job's secret poses as rank 0 or another rank",
    "the ranks meet without the stranger ([security](security.md))",
)
@pytest.mark.parametrize(
    ("rank", "where"),
    [
        pytest.param("0", "node1", id="rank 0"),
        pytest.param("1", "node3", id="rank 1", marks=pytest.mark.full),
    ],
)
def test_a_stranger_does_not_get_in(slurm: Cluster, tmp_path: Path, rank: str, where: str) -> None:
    """As rank 0, on rank 0's node, where it takes the first port; or as rank 1, from a node that is not the job's."""
    (tmp_path / "victim.py").write_text(VICTIM.format(hello=f"{ROOT}/examples/hello_ddp.py"))
    (tmp_path / "stranger.py").write_text(STRANGER)
    command = ("python", f"{tmp_path}/victim.py", rank, f"{tmp_path}/go")
    spec = JobSpec(name="victim", command=command, nodes=2, gpus_per_node=1, sbatch_options=("--nodelist=node1,node2",))
    job = slurm.submit(slurm.script(spec), tmp_path)
    there = ["srun", "--quiet", "--nodes=1", f"--nodelist={where}", "python", f"{tmp_path}/stranger.py"]
    stranger = subprocess.Popen(
        [*there, rank, str(job.job_id), "node1", "node2"],
        env=dict(slurm.env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert stranger.stdout is not None
    assert stranger.stdout.readline() == "trying\n"
    stays(lambda: stranger.poll() is None, 5)
    (tmp_path / "go").touch()
    assert "The sum of all ranks is 1." in job.succeed()
    said, _ = stranger.communicate(timeout=scaled(LIMIT_S))
    assert "IN" not in said.splitlines()
    assert ("1 of 2 ranks arrived", "rank 1 did not find rank 0")[int(rank)] in said


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["srun", "fork"])
def test_each_start_has_a_secret_of_its_own_and_shows_it_to_nobody(
    slurm: Cluster, tmp_path: Path, launcher: str
) -> None:
    place, seen = Place(slurm, tmp_path / "place"), tmp_path / "seen"
    for folder in (place.folder, seen):
        folder.mkdir()
    (place.folder / "note.py").write_text(NOTE)
    options = ("--nodes", "2", "--gpus-per-node", "1", "--launcher", launcher, "--setup", "set -x")
    run_dir = place.start(*options, "--", "python", "note.py", str(seen))
    said = place.completed(run_dir)
    assert said.count("met met") == 2, said
    secrets = [{(seen / f"{rank}.{start}").read_text() for rank in range(2)} for start in (0, 1)]
    assert [len(of_start) for of_start in secrets] == [1, 1]
    assert secrets[0] != secrets[1]
    job = run_dir.name.rpartition("-")[2]
    texts = [output(run_dir), *(path.read_bytes().decode("latin-1") for path in run_dir.rglob("*") if path.is_file())]
    texts += [commands.run(["scontrol", *words], env=slurm.env) for words in (("show", "job", "-d", job),)]
    for secret in secrets[0] | secrets[1]:
        assert len(secret) == 64
        assert not any(secret in text for text in texts)
