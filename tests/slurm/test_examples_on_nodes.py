"""The examples that are for several nodes, on several nodes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from pathlib import Path

import pytest
from cluster import ROOT, Cluster, Place, output
from slowness import wait_until

from cluster_ddp.slurm import commands

pytestmark = pytest.mark.full

PORT = 20_000 + os.getpid() % 10_000


@pytest.mark.parametrize("name", ["mnist_ddp_plain.sbatch", "mnist_ddp_launch.sbatch"])
def test_a_batch_script_of_ones_own(name: str, slurm: Cluster, mnist: Path, tmp_path: Path) -> None:
    """In a folder that looks like a checkout. One line differs."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "data").symlink_to(mnist)
    script = ROOT / "examples" / "slurm" / name
    assert len(script.read_text().splitlines()) <= 25
    done = slurm.run("sbatch", "--wait", "--output=out", "--mem-per-cpu=500M", str(script), "--dry-run", cwd=tmp_path)
    said = (tmp_path / "out").read_text()
    assert done.returncode == 0, said
    assert re.findall(r"Train Epoch: 1 \[0/(\d+)|Accuracy: \d+/(\d+)", said) == [("235", ""), ("", "10000")], said


def test_the_two_batch_scripts_differ_in_one_line() -> None:
    plain, ours = ((ROOT / "examples/slurm" / f"mnist_ddp_{name}.sbatch").read_text() for name in ("plain", "launch"))
    differ = [lines for lines in zip(plain.splitlines()[2:], ours.splitlines()[2:], strict=True) if len({*lines}) > 1]
    assert [(a.split()[0], b.split()[:2]) for a, b in differ] == [("srun", ["cluster-ddp", "launch"])]


def test_a_training_on_two_nodes_is_warned_requeued_and_resumes(slurm: Cluster, tmp_path: Path) -> None:
    """As its first lines say. The warning comes while the ranks still import torch.

    They get it within a second of having a handler, so each step takes longer: it would come too late.
    """
    place, script, step = Place(slurm, tmp_path), tmp_path / "mnist_ddp.py", "            checkpoint.step()\n"
    text = (ROOT / "examples" / "mnist_ddp.py").read_text().replace("import argparse", "import argparse\nimport time")
    script.write_text(text.replace(step, f"{step}            time.sleep(0.05)\n"))
    command = ("--nodes", "2", "--", "python", str(script), "--epochs", "3")
    run_dir = place.start("--requeue", *command)
    job = json.loads((run_dir / "job.json").read_text())["job"]
    # Before, the warning would find bash without its traps
    wait_until(lambda: pythons_of(script) >= 2, said=lambda: output(run_dir))
    commands.run(["scancel", "--signal=USR1", job], env=slurm.env)
    said = place.completed(run_dir)
    assert "got USR1. Saved.\n" in said
    assert re.search(r"Resuming from \S+/step-\d+\.pt: step \d+, (after )?epoch 1", said), said
    assert re.findall(r"^Train Epoch: (\d) \[0/", said, re.MULTILINE) == ["1", "2", "3"]
    assert len(re.findall(r"^Test set: .*, Accuracy: \d+/360", said, re.MULTILINE)) == 3


def pythons_of(script: Path) -> int:
    """How many Python processes run a script."""
    path, found = str(script).encode(), 0
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found += cmdline.read_bytes().split(b"\0")[1:2] == [path]
    return found


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("webdataset_stream.py", ("--data", "tars")),  # each rank reads tar files of its own
        ("gpt_fsdp.py", ("--strategy", "hsdp", "--layers", "2", "--batch-size", "3")),
    ],
    ids=["stream", "hsdp"],
)
def test_a_training_whose_rank_was_killed_on_another_node_ends_with_the_same_weights(
    name: str, arguments: tuple[str, ...], slurm: Cluster, tmp_path: Path
) -> None:
    """Four ranks on two nodes. One job is undisturbed; in the other, rank 3 is killed in epoch 2."""
    place, script, step = Place(slurm, tmp_path), tmp_path / name, "            checkpoint.step()\n"
    kill = f"{step}            if world.rank == 3 and checkpoint.steps == 42 and not world.topology.restart_count:\n"
    text = (ROOT / "examples" / name).read_text()
    assert text.count(step) == 1
    script.write_text(
        text.replace(step, f"{kill}                __import__('os').kill(__import__('os').getpid(), 9)\n")
    )
    ends = []
    for path, options in ((str(ROOT / "examples" / name), ()), (str(script), ("--restarts", "1"))):
        command = ("--nodes", "2", "--gpus-per-node", "2", *options, "--", "python", path, "--epochs", "2")
        said = place.completed(place.start(*command, *arguments))
        ends.append(re.findall(r"^(epoch 2: .*|weights.*)", said, re.MULTILINE))
    assert re.search(r"Resuming from .*: step \d+, epoch \d, \d+ of its \d+ samples seen", said), said
    assert len(ends[0]) == 2 and ends[0] == ends[1], said


def test_ranks_started_by_hand_on_two_hosts(slurm: Cluster, tmp_path: Path) -> None:
    """srun only plays the two terminals here: the ranks see nothing of Slurm."""
    script, folder = shlex.quote(f"{ROOT}/examples/convnet.py"), shlex.quote(f"{tmp_path}/run")
    words = "--epochs 1 --log-interval 5 --world-size 2"
    by_hand = (
        f'exec env -i PATH="$PATH" OMP_NUM_THREADS=1 CLUSTER_DDP_RUN_DIR={folder} python {script} {words} '
        f'--rank "$SLURM_PROCID" --master-addr "$1" --master-port {PORT}'
    )
    nodes = slurm.layout.node_names[:2]
    options = (f"--nodelist={','.join(nodes)}", "--nodes=2", "--ntasks-per-node=1", "--gres=gpu:1")
    done = slurm.run("srun", *options, "bash", "-c", by_hand, "bash", nodes[0], cwd=tmp_path)  # not where MNIST may be
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Training completed in") == 1
    assert re.search(r"epoch 1, step 5/8: loss \d\.\d+, accuracy 0\.\d+", done.stdout), done.stdout
