"""What Topology makes of the variables that a real srun sets, against what the tasks themselves see."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from cluster import Cluster

from cluster_ddp.slurm.hostlist import expand
from cluster_ddp.slurm.port import master_port

pytestmark = pytest.mark.full

STEPS = {
    "block": "srun --distribution=block",
    "cyclic": "srun --distribution=cyclic",
    "unequal": "srun --ntasks=5 --nodes=3",
    "part": "srun --nodes=2 --ntasks=4 --relative=1",
    # (--mem=0: the step before may have its memory still)
    "atonce1": "srun --overlap --mem=0 --nodes=1 --ntasks=2",
    "atonce2": "srun --overlap --mem=0 --nodes=2 --ntasks=4 --relative=1",
}
# Each task writes what we say of it, and, from the kernel, where it really runs.
TASK = """bash -c '{ hostname; python -m cluster_ddp env --json; } >$1.$SLURM_PROCID' bash"""


@pytest.fixture(scope="module")
def tasks(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, tuple[str, dict]]]:
    """Step -> rank -> host name and Topology: one job of 3 x 2 tasks, the last two steps at the same time."""
    folder = tmp_path_factory.mktemp("topology")
    lines = [f"{command} {TASK} {folder}/{name}" for name, command in STEPS.items()]
    lines[-2:] = [f"{lines[-2]} &", f"{lines[-1]} &", "wait %1", "wait %2"]  # their statuses are the job's
    script = ["#!/bin/bash", "#SBATCH --nodes=3 --ntasks-per-node=2", "set -e", *lines]
    slurm.submit("\n".join(script) + "\n", folder).succeed()
    found: dict[str, dict[int, tuple[str, dict]]] = {name: {} for name in STEPS}
    for name in STEPS:
        for path in folder.glob(f"{name}.*"):
            host, line = path.read_text().splitlines()
            found[name][int(path.suffix[1:])] = (host, json.loads(line))
    return found


SIZES = {"block": 6, "cyclic": 6, "unequal": 5, "part": 4, "atonce1": 2, "atonce2": 4}


@pytest.mark.parametrize("step", STEPS)
def test_every_task_knows_its_place(tasks: dict[str, dict[int, tuple[str, dict]]], step: str) -> None:
    ranks = tasks[step]
    assert sorted(ranks) == list(range(SIZES[step]))
    per_host = Counter(host for host, _ in ranks.values())
    for rank, (host, topology) in ranks.items():
        assert topology["launcher"] == "slurm"
        assert topology["rank"] == rank
        assert topology["world_size"] == SIZES[step]
        assert topology["nodes"][topology["node_rank"]] == host
        assert topology["num_nodes"] == len(per_host) == len(topology["nodes"])
        assert topology["local_world_size"] == per_host[host]
        assert topology["tasks_per_node"] == [per_host[node] for node in topology["nodes"]]
        assert topology["master_addr"] == ranks[0][0]
        assert topology["master_port"] == master_port(topology["job_id"], topology["step_id"])
    for host in per_host:
        local_ranks = [
            t["local_rank"] for _, t in (ranks[rank] for rank in sorted(ranks)) if t["nodes"][t["node_rank"]] == host
        ]
        assert local_ranks == list(range(per_host[host]))


def test_the_steps_were_what_they_are_called(tasks: dict[str, dict[int, tuple[str, dict]]]) -> None:
    hosts = {step: [tasks[step][rank][0] for rank in sorted(tasks[step])] for step in STEPS}
    first, second, third = dict.fromkeys(hosts["block"])
    assert hosts["block"] == [first, first, second, second, third, third]
    assert hosts["cyclic"] == [first, second, third, first, second, third]
    assert hosts["part"] == hosts["atonce2"] == [second, second, third, third]
    assert len(set(Counter(hosts["unequal"]).values())) == 2
    ports = {tasks[step][0][1]["master_port"] for step in STEPS}
    assert len(ports) == len(STEPS)


def test_a_container_that_strips_the_local_id_without_gpus_is_told(slurm: Cluster, tmp_path: Path) -> None:
    """Without GPUs there is nothing to derive it from: see the error; with GPUs see test_errors."""
    done = slurm.run("srun", "--ntasks=2", "env", "-u", "SLURM_LOCALID", "python", "-m", "cluster_ddp", "env")
    assert done.returncode != 0
    assert "SLURM_LOCALID unset" in done.stderr


def test_gpus_per_task_binds_one_to_one(slurm: Cluster) -> None:
    code = (
        "import os; from cluster_ddp.runtime.device import device; from cluster_ddp.slurm.topology import Topology;"
        "visible = os.environ['CUDA_VISIBLE_DEVICES'].split(',');"
        "t = Topology.from_environ(os.environ);"
        "print(t.rank, t.gpus_on_node, *visible, device.choose(t, len(visible), os.environ))"
    )
    done = slurm.run("srun", "--nodes=1", "--ntasks=2", "--gpus-per-task=1", "python", "-c", code)
    assert sorted(done.stdout.splitlines()) == ["0 2 0 cuda:0", "1 2 1 cuda:0"], done.stderr
    done = slurm.run("srun", "--nodes=1", "--ntasks=2", "--gres=gpu:2", "python", "-c", code)
    assert sorted(done.stdout.splitlines()) == ["0 2 0 1 cuda:0", "1 2 0 1 cuda:1"], done.stderr


def expressions(count: int) -> list[str]:
    """Hostlists of all kinds that scontrol 22.05 reads (it refuses text after a bracket)."""
    rng = random.Random(20)

    def bracket() -> str:
        pieces = []
        for _ in range(rng.randint(1, 4)):
            width = rng.choice([1, 1, 2, 3, 5])
            low = rng.randint(0, 10**width - 1)
            high = low + rng.randint(0, 12)
            pieces.append(rng.choice([f"{low:0{width}d}", f"{low:0{width}d}-{high:0{width}d}", f"{low}-{high}"]))
        return f"[{','.join(pieces)}]"

    def item() -> str:
        name = rng.choice(["n", "gpu", "rack-", "a1b", "node0", "x.y-", "", "Z_"])
        kind = rng.randrange(4)
        if kind == 0:
            return f"{name or 'h'}{rng.randint(0, 120):0{rng.choice([1, 3])}d}"
        return f"{name}{bracket()}" + (bracket() if kind == 3 else "")

    return [rng.choice([",", ",", ",,"]).join(item() for _ in range(rng.randint(1, 4))) for _ in range(count)]


def test_hostlists_are_expanded_as_scontrol_does(slurm: Cluster, tmp_path: Path) -> None:
    texts = expressions(600)
    (tmp_path / "texts").write_text("\n".join(texts) + "\n")
    ask = 'while read -r text; do scontrol show hostnames "$text" | tr "\\n" " "; echo; done <"$1"'
    answers = slurm.run("bash", "-c", ask, "bash", str(tmp_path / "texts")).stdout.splitlines()
    assert len(answers) == len(texts)
    understood = [(text, answer.split()) for text, answer in zip(texts, answers) if answer.strip()]
    assert len(understood) >= 500
    for text, hosts in understood:
        assert expand(text) == hosts, text
