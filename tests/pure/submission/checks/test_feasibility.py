"""What a cluster can surely not give is an error with a change that fits; what is uncertain is a warning."""

from __future__ import annotations

from typing import Any

import pytest

from cluster_ddp.errors import SpecError
from cluster_ddp.slurm.partitions import NodeGroup
from cluster_ddp.submission.checks.feasibility import check
from cluster_ddp.submission.spec import JobSpec

DAY_S = 86400


def group(partition: str, nodes: int, gpus: dict[str, int], **fields: Any) -> NodeGroup:
    common: dict[str, Any] = {"default": False, "up": True, "usable": True, "cpus": 32, "mem_mb": 128000}
    return NodeGroup(partition=partition, nodes=nodes, gpus=gpus, **({**common, "time_limit_s": DAY_S} | fields))


def spec(**fields: Any) -> JobSpec:
    return JobSpec(name="job", command=("python", "x.py"), **fields)


SITE = [
    group("main", 3, {"a100": 4}, default=True),
    group("main", 1, {"a100": 4}, default=True, usable=False),
    group("main", 4, {"v100": 2}, default=True, cpus=16, mem_mb=64000),
    group("big", 2, {"h100": 8}, cpus=96, mem_mb=1030000, time_limit_s=2 * DAY_S),
    group("cpu", 9, {}, time_limit_s=None),
    group("old", 2, {"": 2}, up=False, time_limit_s=None),
]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"nodes": 7, "gpus_per_node": 2},
        {"nodes": 3, "gpus_per_node": 4, "gpu_type": "a100", "cpus_per_task": 8, "mem": "125G", "time": "1-0"},
        {"nodes": 4, "gpus_per_node": 2, "gpu_type": "v100", "cpus_per_task": 8, "mem": "64000"},
        {"nodes": 2, "gpus_per_node": 8, "partition": "big", "time": "2-0"},
        {"gpus_per_node": 8, "partition": "cpu,main,big"},
        {"time": "1-12", "partition": "main,big"},
        {"mem": "0"},
        {"nodes": 6, "restarts": 1, "spare_nodes": 1, "gpus_per_node": 2},
        {"nodes": 2, "max_nodes": 8},
    ],
)
def test_what_fits(fields: dict[str, Any]) -> None:
    assert check(spec(**fields), SITE) == []


@pytest.mark.parametrize(
    ("fields", "found", "hint"),
    [
        ({"partition": "man"}, "main, big, cpu, old. Did you mean main?", "--partition main"),
        ({"partition": "main,hug"}, "no such partition; there are", "--partition with one of these names"),
        ({"gpu_type": "A100"}, "the cluster has a100, h100, v100.", "--gpu-type a100"),
        (
            {"gpus_per_node": 8},
            "the nodes of partition main have at most 4 GPUs. "
            "GPUs per node: main: 4 a100, 2 v100; big: 8 h100; cpu: no GPUs; old: 2.",
            "--nodes 2 --gpus-per-node 4, or --partition big",
        ),
        ({"gpus_per_node": 9, "partition": "big"}, "at most 8 GPUs", "--gpus-per-node 8"),
        ({"gpus_per_node": 4, "gpu_type": "v100"}, "at most 2 GPUs of type v100", "--nodes 2 --gpus-per-node 2"),
        ({"gpu_type": "h100"}, "main have no GPUs of type h100", "--partition big"),
        ({"partition": "cpu"}, "the nodes of partition cpu have no GPUs", "--partition main, or --partition big"),
        ({"nodes": 9}, "partition main has 8 nodes with these GPUs, CPUs and memory, not 9", "--nodes 8"),
        ({"nodes": 5, "gpus_per_node": 4}, "has 4 nodes with these GPUs, CPUs and memory, not 5", "--nodes 4"),
        ({"nodes": 6, "gpus_per_node": 8}, "at most 4 GPUs", "--nodes 4 --gpus-per-node 4"),
        ({"nodes": 9, "max_nodes": 12}, "CPUs and memory, not 9", "--nodes 8-12"),
        ({"nodes": 2, "max_nodes": 3, "gpus_per_node": 8}, "at most 4 GPUs", "--gpus-per-node 4, or --partition big"),
        ({"nodes": 8, "restarts": 1, "spare_nodes": 1}, "has 8 nodes with these", "--spare-nodes 0"),
        ({"nodes": 7, "restarts": 1, "spare_nodes": 3}, "CPUs and memory, not 10", "--spare-nodes 1"),
        ({"nodes": 9, "restarts": 1, "spare_nodes": 1}, "CPUs and memory, not 10", "--nodes 8 --spare-nodes 0"),
        (
            {"gpus_per_node": 4, "cpus_per_task": 10},
            "the nodes of partition main with 4 GPUs have 32 CPUs, not 40 (10 for each rank)",
            "--cpus-per-task 8, or --partition big",
        ),
        (
            {"gpus_per_node": 2, "gpu_type": "v100", "mem": "100G"},
            "with 2 GPUs of type v100 have 64000M of memory, not 100G",
            "--mem 62G",
        ),
        ({"mem": "2T"}, "have 128000M of memory, not 2T", "--mem 125G"),
        ({"nodes": 5, "mem": "100G"}, "has 4 nodes with these GPUs, CPUs and memory, not 5", "--nodes 4"),
        (
            {"time": "25:0:0"},
            "main is 1-00:00:00; the job asks for 1-01:00:00",
            "--time 1-00:00:00, or --partition big",
        ),
        ({"time": "UNLIMITED"}, "partition main is 1-00:00:00; the job asks for UNLIMITED", "--time 1-00:00:00"),
        (
            {"time": "3-0", "partition": "main,big"},
            "main is 1-00:00:00; the job asks for 3-00:00:00; the time limit of partition big is 2-00:00:00",
            "--time 1-00:00:00, or --time 2-00:00:00",
        ),
        (
            {"gpus_per_node": 16, "cpus_per_task": 16, "mem": "1T", "time": "3-0", "partition": "main"},
            "at most 4 GPUs",
            "--nodes 4 --gpus-per-node 4 --cpus-per-task 8 --mem 125G --time 1-00:00:00",
        ),
    ],
)
def test_what_the_cluster_does_not_have(fields: dict[str, Any], found: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        check(spec(**fields), SITE)
    assert found in caught.value.found
    assert caught.value.hint == hint


def test_the_error_says_what_was_asked_for() -> None:
    with pytest.raises(SpecError, match=r"^A job of 1 node with 8 GPUs in the default partition, main:\n"):
        check(spec(gpus_per_node=8), SITE)
    with pytest.raises(SpecError, match=r"^A job of 2 nodes with 1 GPU of type a100 in the partition big, cpu:\n"):
        check(spec(nodes=2, gpu_type="a100", partition="big,cpu"), SITE)
    with pytest.raises(SpecError, match=r"^A job of 4 nodes and 1 spare node with 4 GPUs in the default partition"):
        check(spec(nodes=4, gpus_per_node=4, restarts=1, spare_nodes=1), SITE)


@pytest.mark.parametrize(
    ("groups", "fields", "hint"),
    [
        ([group("cpu", 9, {}, default=True)], {}, "see what there is: sinfo -o '%P %D %c %m %G %l'"),
        ([group("cpu", 9, {}, default=True)], {"gpu_type": "a100"}, "leave out --gpu-type"),
        ([group("cpu", 9, {}, default=True), SITE[-1]], {}, "see what there is: sinfo -o '%P %D %c %m %G %l'"),
        ([group("one", 1, {"": 8}, default=True, cpus=4)], {"gpus_per_node": 8, "cpus_per_task": 1}, "see what"),
        ([group("empty", 0, {}, default=True, cpus=0, mem_mb=0), *SITE[3:4]], {}, "--partition big"),
    ],
)
def test_where_little_fits(groups: list[NodeGroup], fields: dict[str, Any], hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        check(spec(**fields), groups)
    assert caught.value.hint.startswith(hint)


@pytest.mark.fault(
    "the upper end of a range of nodes never comes: the partition has fewer, or they are never free",
    "the job starts with what there is, at least MIN. If the partition lacks them, `submit` says so; if it lacks MIN, "
    "it refuses the job",
    bound="at submission",
    also=("test_a_range_of_nodes_shrinks_when_one_is_lost_and_grows_by_a_requeue",),
)
@pytest.mark.parametrize(
    ("groups", "fields", "warnings"),
    [
        ([], {"partition": "x"}, ["sinfo shows no partition, so it was not checked"]),
        (SITE[3:], {}, ["This cluster has no default partition. Name one with --partition: big, cpu, old."]),
        (SITE, {"partition": "old"}, ["Partition old is not up"]),
        (SITE, {"nodes": 4, "gpus_per_node": 4}, ["1 of 4 such nodes of partition main are down, drained"]),
        (
            SITE,
            {"nodes": 2, "max_nodes": 9},
            ["Partition main has 8 such nodes: the job never gets 9. The same: --nodes 2-8."],
        ),
        (SITE, {"partition": "main,old", "nodes": 2, "gpus_per_node": 2}, []),
        (SITE, {"time": "2-0", "qos": "long"}, ["The time limit of partition main is 1-00:00:00, unless the QOS long"]),
        (SITE, {"time": "1-0", "qos": "long"}, []),
        # The site has not told Slurm how much memory there is.
        ([group("main", 1, {"": 4}, default=True, mem_mb=1)], {"mem": "100G"}, []),
    ],
)
def test_warnings(groups: list[NodeGroup], fields: dict[str, Any], warnings: list[str]) -> None:
    texts = check(spec(**fields), groups)
    assert [text[: len(start)] for text, start in zip(texts, warnings, strict=True)] == warnings
    assert all(text.endswith(".") for text in texts)


def test_nodes_that_are_down_in_one_partition_do_not_matter_while_another_has_enough() -> None:
    groups = [group("a", 2, {"": 4}, usable=False), group("b", 2, {"": 4})]
    assert check(spec(partition="a,b", nodes=2), groups) == []
    assert len(check(spec(partition="a", nodes=2), groups)) == 1
