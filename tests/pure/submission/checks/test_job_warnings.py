"""What is advised, and, as telling, what is not."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from cluster_ddp.slurm.partitions import NodeGroup
from cluster_ddp.submission.checks.job_warnings import CODES, advise
from cluster_ddp.submission.spec import JobSpec


@pytest.fixture(autouse=True)
def _temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/scratch/local/me")


def group(partition: str, nodes: int, gpus: dict[str, int], **fields: Any) -> NodeGroup:
    common: dict[str, Any] = {"default": False, "up": True, "usable": True, "cpus": 32, "mem_mb": 128000}
    return NodeGroup(partition=partition, nodes=nodes, gpus=gpus, **({**common, "time_limit_s": None} | fields))


def spec(**fields: Any) -> JobSpec:
    return JobSpec(**({"name": "job", "command": ("python", "x.py")} | fields))


SITE = [
    group("main", 8, {"a100": 4}, default=True),
    group("main", 8, {"v100": 2}, default=True),
    group("single", 8, {"": 1}),
    group("big", 1, {"h100": 8}),
    group("asleep", 1, {"": 8}, usable=False),
]
HOLD = "Inside a node, they exchange gradients faster than over the network: "


@pytest.mark.parametrize(
    ("fields", "code", "end"),
    [
        ({"nodes": 1, "gpus_per_node": 4}, None, ""),
        ({"nodes": 2, "gpus_per_node": 2}, "several-nodes", f"{HOLD}--nodes 1 --gpus-per-node 4."),
        ({"nodes": 2, "mem": "32G"}, "several-nodes", "--nodes 1 --gpus-per-node 2 --mem 64G."),
        ({"nodes": 4}, "several-nodes", "--nodes 1 --gpus-per-node 4."),
        ({"nodes": 4, "gpu_type": "v100"}, "one-gpu-per-node", "--nodes 2 --gpus-per-node 2."),
        ({"nodes": 2, "gpus_per_node": 2, "gpu_type": "v100"}, None, ""),
        ({"nodes": 2, "gpus_per_node": 4}, None, ""),
        ({"nodes": 2, "gpus_per_node": 4, "partition": "main,big"}, "several-nodes", "--nodes 1 --gpus-per-node 8."),
        ({"nodes": 2, "gpus_per_node": 4, "partition": "big", "restarts": 1, "spare_nodes": 1}, None, ""),
        ({"nodes": 2, "gpus_per_node": 2, "cpus_per_task": 16}, None, ""),
        ({"nodes": 2, "gpus_per_node": 2, "mem": "100G"}, None, ""),
        ({"nodes": 2, "gpus_per_node": 4, "partition": "asleep"}, None, ""),
        ({"nodes": 8}, "one-gpu-per-node", "--nodes 2 --gpus-per-node 4."),
        ({"nodes": 6, "mem": "8G"}, "one-gpu-per-node", "--nodes 2 --gpus-per-node 3 --mem 24G."),
        ({"nodes": 7}, "one-gpu-per-node", "on fewer nodes with --nodes and --gpus-per-node."),
        ({"nodes": 7, "partition": "single"}, None, ""),
        ({"nodes": 2, "partition": "unknown"}, "one-gpu-per-node", "with --nodes and --gpus-per-node."),
    ],
)
def test_gpus_on_more_nodes_than_they_need(fields: dict[str, Any], code: str | None, end: str) -> None:
    advice = advise(spec(**fields), SITE)
    assert [one.code for one in advice] == ([code] if code else [])
    assert all(one.text.endswith(end) for one in advice)


@pytest.mark.parametrize(
    ("fields", "codes"),
    [({"nodes": 2, "gpus_per_node": 2}, []), ({"nodes": 2}, ["one-gpu-per-node"]), ({"nodes": 1}, [])],
)
def test_nothing_is_known_of_the_cluster(fields: dict[str, Any], codes: list[str]) -> None:
    assert [one.code for one in advise(spec(**fields), [])] == codes


@pytest.mark.parametrize(
    ("fields", "requeue_default", "advised"),
    [
        ({"time": "5:0:0", "requeue": False}, None, True),
        ({"time": "5:0:0", "requeue": False}, True, True),
        ({"time": "5:0:0"}, False, True),
        ({"time": "UNLIMITED"}, False, True),
        ({"time": "5:0:0"}, True, False),
        ({"time": "5:0:0"}, None, False),
        ({"time": "5:0:0", "requeue": True}, False, False),
        ({"time": "5:0:0", "sbatch_options": ("--requeue=expedite",)}, False, False),
        ({"time": "4:0:0", "requeue": False}, False, False),
        ({"requeue": False}, False, False),
    ],
)
def test_a_long_job_that_is_not_started_again(
    fields: dict[str, Any], requeue_default: bool | None, advised: bool
) -> None:
    advice = advise(spec(**fields), SITE, requeue_default=requeue_default)
    assert [one.code for one in advice] == (["no-requeue"] if advised else [])
    assert all("With --requeue" in one.text for one in advice)


@pytest.mark.parametrize(
    ("arguments", "folders", "named"),
    [
        (["/tmp/data"], [], "/tmp/data is "),
        (["--data=/tmp/it's mine"], [], "/tmp/it's mine is "),
        (["out=/dev/shm/x"], [], "/dev/shm/x is "),
        (["/home/me/../../var/tmp/x"], [], "/home/me/../../var/tmp/x is "),
        (["--data", "/scratch/local/me/x"], [], "/scratch/local/me/x is "),
        ([], [Path("/tmp"), Path("/home/me")], "/tmp is "),
        (["/tmp/a", "--out=/tmp/b", "/tmp/a"], [Path("/tmp/b"), Path("/tmp/c")], "/tmp/a and /tmp/b and /tmp/c are "),
        (["/tmpfs/x", "tmp/x", "--data=/home/tmp/x", "/scratch/local/you", "echo /tmp/x"], [Path("tmp")], None),
    ],
)
def test_a_path_that_every_node_has_for_itself(arguments: list[str], folders: list[Path], named: str | None) -> None:
    advice = advise(spec(command=("python", "x.py", *arguments)), SITE, folders=folders)
    assert [one.code for one in advice] == (["node-local-path"] if named else [])
    assert all(one.text.startswith(named or "") for one in advice)


@pytest.mark.parametrize(
    ("time", "signal", "advised"),
    [
        ("1:30", "USR1@120", True),
        ("1:30", "R:USR1@60", True),
        ("3", "USR1@120", True),
        ("3:01", "USR1@120", False),  # Slurm makes it four minutes
        ("2", "USR1", True),
        ("3", "USR1", False),
        ("1", None, False),
        ("UNLIMITED", "USR1@9999", False),
        (None, "USR1@9999", False),
    ],
)
def test_a_warning_that_comes_when_the_job_starts(time: str | None, signal: str | None, advised: bool) -> None:
    advice = advise(spec(time=time, signal=signal), SITE)
    assert [one.code for one in advice] == (["early-signal"] if advised else [])


def test_every_code_can_be_had_and_is_a_whole_sentence() -> None:
    local = spec(nodes=8, time="1-0", requeue=False, command=("/tmp/x",))
    early = spec(launcher="fork", time="1", signal="USR1@60")
    advice = [*advise(local, SITE), *advise(spec(nodes=2), SITE), *advise(early, SITE)]
    assert sorted(one.code for one in advice) == sorted(CODES)
    for one in advice:
        assert one.text.endswith(".")
        assert "\n" not in one.text
