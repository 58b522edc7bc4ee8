"""The jobs that users submit, run on the real thing."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import ROOT, Cluster, Job, records
from slowness import scaled

from cluster_ddp.sandbox.layout import STATE_ROOT
from cluster_ddp.slurm.port import candidates, master_port
from cluster_ddp.submission.spec import JobSpec

HELLO = ("python", "examples/hello_ddp.py")
# Holds a port of the master node before the ranks come. A thief that does not listen is seen by nobody but the kernel.
THIEF = """python -c 'import os, socket, sys, time
from cluster_ddp.sandbox.layout import STATE_ROOT
from cluster_ddp.slurm.port import master_port
thief = socket.socket()
thief.bind(("", master_port(int(os.environ["SLURM_JOB_ID"]))))
{listen}
print("holding", thief.getsockname()[1], flush=True)
time.sleep(86400)' &"""


TRAINING = ("--recipe", "fast", "--amp", "off", "--epochs", "1", "--batch-size", "64")


@dataclass(frozen=True)
class Started:
    """The long jobs, which run beside the other tests."""

    training: Job
    training_dir: Path
    """Of all of MNIST if a test asks for it, else of one step."""
    array: Job
    array_runs: Path


@pytest.fixture(scope="module")
def started(
    slurm: Cluster, mnist: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Started:
    folder = tmp_path_factory.mktemp("jobs")
    whole = any(item.name.startswith(test_four_ranks_learn_mnist.__name__) for item in request.session.items)
    training_dir = folder / "training"
    training = slurm.submit(
        slurm.job("mnist_2node"),
        folder,
        *(*TRAINING, *(() if whole else ("--dry-run",)), "--data-dir", str(mnist), "--run-dir", str(training_dir)),
    )
    # Two ranks on two nodes, one GPU each: the tasks of the array may share both nodes, and the master node.
    array = slurm.submit(
        slurm.job("mnist_array"),
        folder,
        *("--dry-run", "--dataset", "digits"),
        options=("--array=0-1", "--nodes=2", "--ntasks-per-node=1", "--gres=gpu:1", f"--chdir={folder}"),
    )
    return Started(training, training_dir, array, folder / "runs")


@pytest.fixture(autouse=True)
def _start_the_long_ones_first(request: pytest.FixtureRequest) -> None:
    """Whatever test of this file runs first; not on a Slurm where no test needs them."""
    chosen = [item for item in request.session.items if item.module is request.module]
    if any("started" in item.fixturenames and slurm_of(item) == slurm_of(request.node) for item in chosen):
        request.getfixturevalue("started")


def slurm_of(item: pytest.Function) -> str | None:
    return item.callspec.params["slurm"]


@pytest.mark.every_slurm
@pytest.mark.parametrize("script", sorted((ROOT / "jobs").glob("*.sbatch")), ids=lambda path: path.stem)
def test_sbatch_accepts_the_rendered_jobs(slurm: Cluster, script: Path) -> None:
    done = slurm.run("sbatch", "--test-only", str(script))
    assert done.returncode == 0, done.stderr


@pytest.mark.full
@pytest.mark.every_slurm
def test_hello(slurm: Cluster, tmp_path: Path) -> None:
    output = slurm.submit(slurm.job("hello_ddp"), tmp_path).succeed()
    assert re.findall(r"rank (\d) of 4 on node\d, cpu", output) == ["0", "1", "2", "3"]
    assert "The sum of all ranks is 6." in output


@pytest.mark.full
def test_ranks_that_drive_two_gpus_each(slurm: Cluster, tmp_path: Path) -> None:
    """Two nodes with two GPUs each: a rank on each node, whose model is on both."""
    spec = JobSpec(
        name="two_device_model",
        command=("python", str(ROOT / "examples" / "two_device_model.py")),
        nodes=2,
        gpus_per_node=2,
        gpus_per_task=2,
        setup=(f"export CLUSTER_DDP_RUN_DIR={tmp_path}/run",),
    )
    output = slurm.submit(slurm.script(spec), tmp_path).succeed()
    assert re.findall(r"epoch (\d): accuracy 0\.\d+, on cpu and cpu", output) == ["1", "2"]


@pytest.mark.fault(
    "another program takes a candidate port before rank 0 binds it", "rank 0 uses the next candidate", bound="0.25 s"
)
@pytest.mark.parametrize(
    "listen",
    [pytest.param("thief.listen()", id="listening", marks=pytest.mark.full), pytest.param("", id="bound only")],
)
def test_a_taken_first_port_does_not_cost_the_job(slurm: Cluster, tmp_path: Path, listen: str) -> None:
    setup = (THIEF.format(listen=listen), "sleep 2")
    spec = JobSpec(name="thief", command=HELLO, nodes=2, gpus_per_node=1, setup=setup)
    output = slurm.submit(slurm.script(spec), tmp_path).succeed()
    assert "holding 1" in output
    assert "The sum of all ranks is 1." in output


@pytest.mark.full
def test_a_taken_port_without_our_template(slurm: Cluster, tmp_path: Path) -> None:
    """A batch script of the user's own, which exports nothing."""
    script = f"#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1\n{THIEF.format(listen='thief.listen()')}\nsleep 2\n"
    output = slurm.submit(script + f"srun {' '.join(HELLO)}\n", tmp_path).succeed()
    assert "The sum of all ranks is 1." in output


def test_a_rank_that_never_starts_is_named(slurm: Cluster, tmp_path: Path) -> None:
    """Rank 1 sleeps; the other ends within its timeout, and the step with it."""
    train = ("python", "-m", "cluster_ddp.train", "--dataset", "digits", "--rendezvous-timeout-s", f"{scaled(15):g}")
    command = slurm.wrapped("if ((SLURM_PROCID == 1)); then sleep 86400; fi", *train)
    spec = JobSpec(name="missing", command=command, nodes=2, gpus_per_node=1)
    _, output = slurm.submit(slurm.script(spec), tmp_path).fail()
    assert re.search(r"1 of 2 ranks arrived; missing: rank 1 \(node\d\)\.", output)


@pytest.mark.full
def test_dead_name_servers_do_not_hold_up_the_ranks(slurm: Cluster, tmp_path: Path) -> None:
    """Plain torch waits minutes for them, which would be over this rendezvous' time.

    On each node the name server's packets go to nobody, and /etc/hosts knows the nodes one way only.
    """
    subnet = (STATE_ROOT / slurm.name / "hosts").read_text().split(".2 ctl")[0].splitlines()[-1]
    (tmp_path / "resolv.conf").write_text(f"nameserver {subnet}.250\noptions timeout:30 attempts:5\n")
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{subnet}.1{i} node{i}\n" for i in range(1, 5)))
    binds = [f"mount --bind {tmp_path}/{name} /etc/{name}" for name in ("hosts", "resolv.conf")]
    lines = f"ip neigh replace {subnet}.250 lladdr 02:00:00:00:00:09 dev eth0\n{' && '.join(binds)}"
    options = ("--dataset", "digits", "--dry-run", "--run-dir", f"{tmp_path}/run")
    options += ("--rendezvous-timeout-s", f"{scaled(8):g}")
    command = slurm.wrapped(lines, "python", "-m", "cluster_ddp.train", *options)
    spec = JobSpec(name="deaf", command=command, nodes=2, gpus_per_node=1)
    output = slurm.submit(slurm.script(spec), tmp_path).succeed()
    assert "2 ranks, 1437 training samples" in output


@pytest.mark.full
def test_one_ranks_exception_ends_the_step_and_is_printed_once(slurm: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import cluster_ddp, time\n"
        "with cluster_ddp.distributed() as world:\n"
        "    if world.rank == 1: raise ValueError('the one that matters')\n"
        "    world.barrier(); time.sleep(86400)\n"
    )
    spec = JobSpec(name="fails", command=("python", str(script)), nodes=2, gpus_per_node=1)
    _, output = slurm.submit(slurm.script(spec), tmp_path).fail()
    assert output.count("Traceback (most recent call last)") == 1, output
    assert re.search(r"^\[rank 1 node\d\] Traceback", output, re.MULTILINE)
    assert "ValueError: the one that matters" in output
    assert "Connection closed by peer" not in output
    last = r"Failed first, with status 1: rank 1 on node\d: ValueError: the one that matters"
    assert re.fullmatch(last, output.splitlines()[-1]), output
    assert not list(ROOT.glob(".job-*"))


@pytest.mark.full
def test_two_steps_at_once_in_one_job(slurm: Cluster, tmp_path: Path) -> None:
    step = f"srun --overlap --mem=0 --ntasks=2 {{}} {' '.join(HELLO)} &"
    script = "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=2\nset -e\n"
    script += f"{step.format('--nodes=2')}\n{step.format('--nodes=1 --relative=1')}\nwait %1\nwait %2\n"
    output = slurm.submit(script, tmp_path).succeed()
    assert output.count("The sum of all ranks is 1.") == 2
    assert len(re.findall(r"rank \d of 2 on node\d", output)) == 4


def test_array_tasks_that_share_nodes(started: Started) -> None:
    started.array.succeed()
    descriptions = [json.loads(path.read_text()) for path in started.array_runs.glob("*/run.json")]
    topologies = [description["topology"] for description in descriptions]
    assert sorted(topology["array_task_id"] for topology in topologies) == [0, 1]
    job = started.array.job_id
    assert {path.name for path in started.array_runs.iterdir()} == {f"digits-{job}_{task}" for task in range(2)}
    assert sorted(description["config"]["seed"] for description in descriptions) == [0, 1]
    assert all(topology["world_size"] == topology["num_nodes"] == 2 for topology in topologies)
    ports = {topology["port_candidates"][0] for topology in topologies}
    assert ports == {master_port(topology["job_id"]) for topology in topologies}
    assert len(ports) == 2
    digests = {records(path.parent)[-1]["weights_sha256"] for path in started.array_runs.glob("*/run.json")}
    assert len(digests) == 2


def test_four_ranks_train_on_mnist(started: Started) -> None:
    """The loop itself fails unless all ranks end with the same weights."""
    output = started.training.succeed()
    assert records(started.training_dir)[-1]["kind"] == "done"
    topology = json.loads((started.training_dir / "run.json").read_text())["topology"]
    assert (topology["world_size"], topology["num_nodes"]) == (4, 2)
    assert topology["port_candidates"][0] in candidates(topology["job_id"])
    assert "Test set: Average loss" in output


@pytest.mark.full
def test_four_ranks_learn_mnist(started: Started) -> None:
    """At least 97 % after one epoch."""
    started.training.succeed()
    last = [record for record in records(started.training_dir) if record["kind"] == "test"][-1]
    assert (last["epoch"], last["samples"]) == (1, 10_000)
    assert last["accuracy"] >= 0.97
