"""An error of all ranks before they find each other: the first rank of a node prints it, the others name that rank."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from namespaces import unshare
from ranks import job_ids, slurm_step
from slowness import LIMIT_S, scaled

HOST = os.uname().nodename
JOB_ID = job_ids()
PATIENT = "from cluster_ddp.runtime import console\nconsole._SILENCE_S = 60.0\n"
DISTRIBUTED = f"{PATIENT}import cluster_ddp\nwith cluster_ddp.distributed(): ..."
TRAIN = f"{PATIENT}import runpy\nrunpy.run_module('cluster_ddp.train', run_name='__main__', alter_sys=True)"
MISTAKE = "error: Running 3 tasks on this node, 1 GPU each:\n"
OURS = {"CLUSTER_DDP_NOTES": "/it's here", "CLUSTER_DDP_SECRET": "5e"}
ASK = """import os, sys
from cluster_ddp.runtime import console
console._SILENCE_S = 0.5
os.environ.update(word.split("=") for word in sys.argv[1:])
print(console.first_rank_has_said_it(os.environ))
"""


def environment(local_rank: int, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CLUSTER_DDP_"))}
    return {**kept, **slurm_step(local_rank, 3, job_id=JOB_ID), **more}


def run_all(*words: str, **more: str) -> list[tuple[int, str]]:
    """Start three tasks of a step, as srun does. Returns how each ended, and what it printed."""
    tasks = [
        subprocess.Popen(
            [sys.executable, *words], env=environment(rank, **more), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in range(3)
    ]
    said = [task.communicate(timeout=scaled(LIMIT_S))[1].decode() for task in tasks]
    return [(task.returncode, text) for task, text in zip(tasks, said)]


@pytest.mark.fault(
    "a wrong launch (contradicting variables, more tasks than GPUs) under plain srun",
    "the first rank of each node prints the error, each other rank one line",
    bound="4 s",
)
def test_a_wrong_launch_is_told_once() -> None:
    """srun by itself ends no task because another has failed."""
    ends = run_all("-c", DISTRIBUTED, SLURM_GPUS_ON_NODE="1")
    assert [status for status, _ in ends] == [1, 1, 1]
    assert [text.count(MISTAKE) for _, text in ends] == [1, 0, 0]
    named = "[rank {} " + HOST + "] stopped: this node's first rank failed (see its error).\n"
    assert [text for _, text in ends[1:]] == [named.format(rank) for rank in (1, 2)]


def test_a_wrong_option_of_the_training_is_told_once() -> None:
    """sbatch jobs/mnist_2node.sbatch --nodes 4"""
    ends = run_all("-c", TRAIN, "--nodes", "4")
    assert [status for status, _ in ends] == [2, 2, 2]
    assert [text.count("that is an option of sbatch") for _, text in ends] == [1, 0, 0]


def asked(*words: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", ASK, *words], env={**environment(1), **env}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("is_there", "words", "env", "said"),
    [
        (False, (), {}, "True"),
        (True, (), {}, "False"),  # it runs: the error is another's
        (False, (), {"SLURM_LOCALID": "0"}, "False"),  # itself
        (True, (), {"SLURM_STEP_ID": "1"}, "True"),  # that is of another step
        (True, (), {"SLURM_NODEID": "1"}, "True"),  # and of another node, in a sandbox
        (False, ("SLURM_LOCALID=2",), {}, "False"),  # it was forked: nobody can see its variables
        (False, ("MASTER_PORT=8",), OURS, "True"),  # it waited for its start, in which the port is another one
        (True, (), OURS, "True"),  # an agent that stays
        (False, ("CLUSTER_DDP_NOTES=/later",), {}, "False"),  # it began without notes: so may the first one
    ],
)
def test_another_rank_speaks_only_if_the_first_one_still_runs(
    is_there: bool, words: tuple[str, ...], env: dict[str, str], said: str
) -> None:
    secret = {name: env[name] for name in OURS if name in env and name != "CLUSTER_DDP_NOTES"}
    first = subprocess.Popen(["sleep", "600"], env=environment(0, **secret)) if is_there else None
    try:
        assert asked(*words, **env) == said
    finally:
        if first is not None:
            first.kill()
            first.wait()


@pytest.mark.parametrize("shells", [1, 2])
def test_a_rank_that_is_alone_in_its_container_speaks(shells: int) -> None:
    """It sees no other rank there, whether the first one runs or not."""
    words = [sys.executable, "-c", ASK]
    for _ in range(shells):  # such as an init process and the user's script
        words = ["sh", "-c", '"$@"; exit $?', "sh", *words]
    alone = [*unshare("--user", "--map-root-user", "--pid", "--fork", "--mount-proc"), *words]
    assert subprocess.run(alone, env=environment(1), capture_output=True, text=True, check=True).stdout == "False\n"


def test_without_a_launcher_nothing_is_waited_for() -> None:
    kept = {name: value for name, value in environment(0).items() if not name.startswith("SLURM_")}
    done = subprocess.run([sys.executable, "-c", ASK], env=kept, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
