"""Too little memory of a GPU, or of a node."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import Place, output
from restarting import launch

from cluster_ddp.run.names import File, Kind

# As the kernel and Slurm do: the sandbox's nodes have no control groups.
KILLED = """(( SLURM_MEM_PER_NODE >= 2000 )) && exit
echo "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0." >>"$CLUSTER_DDP_RUN_DIR/job.log"
kill -KILL $$"""
TRAINING = Path(__file__).parents[2] / "helpers" / "large_batches.py"


@pytest.mark.fault(
    "a batch is too large for a GPU's memory; with `--restarts` and `global_batch`",
    "the ranks restart with batches half as large, as often as that is needed; updates have the samples as before. It "
    "counts as none of the restarts, no node is left out, and requeues and `--resume` keep the size",
    also=("tests/ranks/agent/job/restart/test_gpu_memory.py",),
)
@pytest.mark.fault(
    "the same, without `global_batch`, or in an evaluation",
    "FAILED at once, with a hint, if nothing was saved since the last failure; else it counts as one of the restarts",
    also=("tests/ranks/agent/job/restart/test_gpu_memory.py",),
)
@pytest.mark.every_slurm
@pytest.mark.full
def test_batches_that_are_too_large_are_halved_where_they_are(place: Place) -> None:
    command = ("python", str(TRAINING), "5", "global_batch")
    job = launch(place, "--restarts", "1", "--spare-nodes", "1", nodes=3, command=command, name="large")
    status = job.end()
    assert (status.state, status.restarts) == ("COMPLETED", 0), output(job.path)
    found = [(one.kind, one.then, one.without, one.micro_batch) for one in job.failures()]
    assert found == [(Kind.GPU_MEMORY, "restart", (), 8), (Kind.GPU_MEMORY, "restart", (), 4)], output(job.path)
    said = (job.path / File.TASK_LOG.format(0)).read_text()
    assert "Micro-batches of 4 samples in place of 16: 4 per update." in said, said


@pytest.mark.fault(
    "the kernel kills a process for memory; with `--restarts`, `--mem` and `--max-mem`",
    "the job is requeued with 1.5 times the memory, up to `--max-mem`. It counts as none of the restarts, and no node "
    "is left out. Without `--max-mem`: FAILED at once, with a hint, if nothing was saved since the last failure",
)
@pytest.mark.every_slurm
@pytest.mark.full
def test_a_job_that_was_killed_for_memory_is_requeued_with_more(place: Place) -> None:
    options = ("--restarts", "1", "--max-mem", "2000")
    sbatch = ("--gres=gpu:1", "--mem=1000", "--requeue", "--open-mode=append")
    command = ("bash", "-c", KILLED)
    job = launch(place, *options, nodes=1, sbatch=sbatch, command=command, launcher="srun", name="memory")
    status = job.end()
    assert (status.state, status.restarts) == ("COMPLETED", 2), output(job.path)
    found = [(one.kind, one.then, one.without, one.mem_mb) for one in job.failures()]
    assert found == [(Kind.HOST_MEMORY, "requeue", (), 1500), (Kind.HOST_MEMORY, "requeue", (), 2000)], output(job.path)
    assert "The memory of a node was too small: the job continues with 1500 MB." in output(job.path)
