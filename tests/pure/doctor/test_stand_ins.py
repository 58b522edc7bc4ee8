"""What the sandbox does not have: GPUs, control groups, InfiniBand, broken hardware. As thin stand-ins as can be."""

from __future__ import annotations

import contextlib
import gzip
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from slowness import scaled

from cluster_ddp.doctor.checks import all_checks, folders, gpu_health, network_setup, resource_limits
from cluster_ddp.doctor.checks.check_types import Site
from cluster_ddp.doctor.findings import Finding, merged, shown_ranks
from cluster_ddp.doctor.step import comparison, connecting, judgement
from cluster_ddp.doctor.step.fingerprint import fingerprint
from cluster_ddp.slurm.topology import Topology

TOPOLOGY = Topology(launcher="slurm", rank=0, local_rank=0, world_size=4, local_world_size=2, num_nodes=2, node_rank=0,
                    nodes=("node1", "node2"), master_addr="node1", port_candidates=(1,), gpus_on_node=2)  # fmt: skip


def site(**env: str) -> Site:
    return Site(env=env, topology=TOPOLOGY, host="node1")


class Nvml(SimpleNamespace):
    """pynvml with two sound GPUs; keyword arguments override."""

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = NVML_TEMPERATURE_GPU = 0
    NVML_NVLINK_MAX_LINKS = 4

    def __init__(self, **functions: Any) -> None:
        sound: dict[str, Any] = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
            "nvmlDeviceGetTotalEccErrors": lambda handle, kind, counter: 0,
            "nvmlDeviceGetRemappedRows": lambda handle: (1, 0, 0, 0),
            "nvmlDeviceGetNvLinkState": lambda handle, link: link < 2,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x01,  # idle
            "nvmlDeviceGetTemperature": lambda handle, sensor: 90,
            "nvmlDeviceGetComputeRunningProcesses": lambda handle: [],
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 99000,
        }
        super().__init__(**{**sound, **functions})


def fail() -> None:
    raise OSError("Driver/library version mismatch")


@pytest.mark.parametrize(
    ("functions", "found", "is_warning"),
    [
        ({"nvmlInit": fail}, "The driver of the GPUs does not answer.", False),
        ({"nvmlDeviceGetCount": lambda: 1}, "A node has fewer GPUs than Slurm gave the job.", False),
        ({"nvmlDeviceGetTotalEccErrors": lambda *_: 3}, "A GPU has uncorrected memory errors (ECC).", False),
        (
            {"nvmlDeviceGetRemappedRows": lambda _: (0, 1, 0, 1)},
            "Memory of a GPU is broken: a row can not be replaced.",
            False,
        ),
        (
            {"nvmlDeviceGetRemappedRows": lambda _: (0, 1, 1, 0)},
            "Memory of a GPU is broken: a row is to be replaced.",
            True,
        ),
        (
            {"nvmlDeviceGetNvLinkState": lambda handle, link: link < 2 - handle},
            "A GPU has fewer NVLinks up than others of its node.",
            True,
        ),
        ({"nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: 0x40}, "A GPU is slowed down by heat or power.", True),
        (
            {"nvmlDeviceGetComputeRunningProcesses": lambda _: [SimpleNamespace(pid=7)]},
            "Other processes use a GPU of this job.",
            True,
        ),
        ({"nvmlSystemGetCudaDriverVersion_v2": lambda: 1020}, "The driver is too old for this torch.", False),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sick_gpus(functions: dict[str, Any], found: str, is_warning: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_health, "torch_versions", lambda: {"cuda": "12.8"})
    first = next(iter(gpu_health.gpu_health.function(site(), Nvml(**functions))))  # type: ignore[call-arg]
    assert (first.what, first.is_warning) == (found, is_warning)
    assert is_warning or first.sick_nodes == ("node1",)


def test_sound_gpus_and_dummy_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_health, "torch_versions", lambda: {"cuda": "12.8"})
    assert not list(gpu_health.gpu_health.function(site(), Nvml()))  # type: ignore[call-arg]
    monkeypatch.setattr(gpu_health, "_pynvml", fail)
    assert not list(gpu_health.gpu_health.function(site(CLUSTER_DDP_DUMMY_GPUS="1")))


@pytest.mark.parametrize(
    ("env", "shown"),
    [
        ({"SLURM_JOB_GPUS": "1,2"}, 2),  # a control group, within which they are 0 and 1
        ({"SLURM_JOB_GPUS": "0,3"}, 2),
        ({"SLURM_STEP_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "0"}, 1),  # each task has its own
        ({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, 1),  # two parts of one GPU
        ({"CUDA_VISIBLE_DEVICES": ""}, 2),  # another check says that they are hidden
    ],
)
def test_a_node_with_all_its_gpus_is_not_short_of_any(
    env: dict[str, str], shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_health, "torch_versions", lambda: {"cuda": "12.8"})
    assert not list(gpu_health.gpu_health.function(site(**env), Nvml(nvmlDeviceGetCount=lambda: shown)))  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("limit_gib", "dummy", "expected"),
    [(2, "1", [False]), (4, "1", [True]), (4, "", [False]), (20, "", []), (None, "", [])],
)
def test_an_address_space_that_a_training_on_the_cpu_can_do_with_is_no_error(
    limit_gib: int | None, dummy: str, expected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = resource.RLIM_INFINITY if limit_gib is None else limit_gib << 30
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    found = list(resource_limits.address_space.function(site(CLUSTER_DDP_DUMMY_GPUS=dummy)))
    assert [one.is_warning for one in found] == expected


def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **texts: str) -> None:
    (tmp_path / "slurm/job_7/step_0").mkdir(parents=True)
    for name, text in texts.items():
        (tmp_path / "slurm/job_7" / name.replace("__", ".")).write_text(text)
    monkeypatch.setattr(Path, "read_text", _with_cgroup(Path.read_text))


def _with_cgroup(real: Any) -> Any:
    def read_text(path: Path, *rest: Any, **more: Any) -> str:
        return "0::/slurm/job_7/step_0/user/task_0\n" if str(path) == "/proc/self/cgroup" else real(path, *rest, **more)

    return read_text


def test_a_memory_limit_and_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit may be the job's only; the kill is of a step before, whose control group is gone."""
    cgroup(tmp_path, monkeypatch, memory__max=str(1024**3), memory__events="low 0\noom 1\noom_kill 2\n")
    (tmp_path / "slurm/job_7/step_0/memory.max").write_text("max\n")
    (tmp_path / "slurm/job_7/step_0/memory.events").write_text("low 0\noom 0\noom_kill 0\n")
    (limit,) = resource_limits.memory_limit.function(site(SLURM_MEM_PER_NODE="4096"), tmp_path)  # type: ignore[call-arg]
    assert "limit 1024 MiB" in limit.evidence and "srun --mem=0" in limit.hint
    assert not list(resource_limits.memory_limit.function(site(SLURM_MEM_PER_NODE="1024"), tmp_path))  # type: ignore[call-arg]
    per_cpu = site(SLURM_MEM_PER_CPU="512", SLURM_CPUS_ON_NODE="8")
    (limit,) = resource_limits.memory_limit.function(per_cpu, tmp_path)  # type: ignore[call-arg]
    assert "SLURM_CPUS_ON_NODE=8, SLURM_MEM_PER_CPU=512 MiB" in limit.evidence
    (kill,) = resource_limits.out_of_memory.function(site(), tmp_path)  # type: ignore[call-arg]
    assert "oom_kill 2" in kill.evidence and kill.is_warning


def test_locked_memory_matters_with_infiniband_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    monkeypatch.setattr(resource_limits, "_INFINIBAND", tmp_path / "infiniband")
    assert not list(resource_limits.locked_memory.function(site()))
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    (found,) = resource_limits.locked_memory.function(site())
    assert "ulimit -Hl: 64 KiB" in found.evidence


def test_facts_that_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the data also the content, of the working folder the commit."""
    (tmp_path / "data").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/HEAD").write_text("ref: refs/heads/main\n")
    (tmp_path / ".git/packed-refs").write_text("# pack-refs\n0123456789abcdef refs/heads/main\n")
    monkeypatch.chdir(tmp_path)
    seen = []
    for content in ("one", "two"):
        (tmp_path / "data" / "train").write_text(content)
        items = fingerprint(
            replace(site(), data_dir=tmp_path / "data", topology=replace(TOPOLOGY, nodes=("localhost",)))
        )
        seen.append(dict(item for item in items if not isinstance(item, str)))
    assert seen[0]["data"] != seen[1]["data"] and seen[0]["data"].startswith("1 files, ")
    assert seen[0]["versions"] == seen[1]["versions"]
    assert seen[0]["versions"]["this folder (git)"] == "0123456789ab"


@pytest.mark.parametrize("is_found", [False, True])
def test_a_file_of_the_data_that_is_cut_off(is_found: bool, tmp_path: Path) -> None:
    (tmp_path / "MNIST/raw").mkdir(parents=True)
    whole = gzip.compress(bytes(9999))
    (tmp_path / "MNIST/raw/images.gz").write_bytes(whole[:-9] if is_found else whole)
    found = list(folders.data_folder.function(replace(site(), data_dir=tmp_path)))
    assert [one.what for one in found] == ["A file of the data is damaged on a node."] * is_found


def reports(*facts: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {rank: {"host": f"node{rank // 2 + 1}", "fingerprint": one, "by": "own"} for rank, one in enumerate(facts)}


def test_two_ranks_with_one_gpu() -> None:
    same = reports({"gpus": ["GPU-a"]}, {"gpus": ["GPU-a"]}, {"gpus": ["GPU-a"]}, {"gpus": ["GPU-b"]})
    (found,) = comparison.differences(TOPOLOGY, same)  # GPU-a of node2 is another one
    assert (found.check, found.evidence) == ("same_gpu", "ranks 0-1 on node1: GPU-a")


def measured(**fields: Any) -> dict[str, Any]:
    return {"failure": None, "failed_in": "gradients", "wrong": [], "gradient": [1.0, 2.0], "step_s": 0.1, **fields}


HOSTS = {rank: f"node{rank // 2 + 1}" for rank in range(4)}


@pytest.mark.parametrize(
    ("fields", "check"),
    [
        ({"failure": "Connection refused", "failed_in": "rendezvous"}, "rendezvous"),
        ({"wrong": ["bfloat16"]}, "all_reduce"),
        ({"gradient": [1.0, 2.5]}, "gradients"),
        ({"step_s": 0.16}, "straggler"),
    ],
)
def test_a_rank_that_computes_wrongly_or_slowly(fields: dict[str, Any], check: str) -> None:
    sound = {rank: measured(host=HOSTS[rank]) for rank in range(4)}
    assert not judgement.of_training(sound)
    (found,) = judgement.of_training({**sound, 3: {**sound[3], **fields}})
    assert (found.check, found.ranks, found.host) == (check, (3,), "node2")


def test_findings_of_several_ranks_are_merged() -> None:
    def one(rank: int, evidence: str, *, is_warning: bool = False) -> Finding:
        found = Finding(check="a", what="Bad.", evidence=evidence, hint="h", is_warning=is_warning)
        return found.seen_on(HOSTS[rank], rank)

    errors = merged([one(0, "w", is_warning=True), one(0, "x"), one(1, "x"), one(2, "y"), one(3, "x")])
    assert [found.is_warning for found in errors] == [False, True]
    assert errors[0].evidence == "ranks 0-1, 3 (node1, node2): x; rank 2 (node2): y."
    assert shown_ranks([5]) == "rank 5"


def test_a_check_that_hangs_is_killed_and_those_that_break_off_are_named() -> None:
    """What its group has found before is kept."""

    def hang() -> Iterator[Any]:
        yield "first"
        yield "found"
        yield {"found": 1}
        yield "second"
        time.sleep(3600)

    def raise_it() -> Iterator[Any]:
        yield "third"
        raise ValueError("odd")

    def abort() -> Iterator[Any]:
        yield "fourth"
        os.abort()

    tasks: dict[str, all_checks.CheckTask] = {
        "hangs": hang,
        "raises": raise_it,
        "aborts": abort,
        "works": lambda: [["yes"]],
    }
    found = all_checks.Running(tasks).results(scaled(5))
    assert found == {
        "hangs": all_checks.CheckResult([{"found": 1}], "second", is_late=True),
        "raises": all_checks.CheckResult([], "third", "ValueError: odd"),
        "aborts": all_checks.CheckResult([], "fourth", "its process ended: SIGABRT"),
        "works": all_checks.CheckResult([["yes"]]),
    }
    (late,) = all_checks.broken_off("hangs", found["hangs"], "node1", 0.5)
    assert (late.what, late.sick_nodes) == ("The check second (hangs) did not come back.", ("node1",))
    (broken,) = all_checks.broken_off("raises", found["raises"], "node1", 0.5)
    assert (broken.what, broken.is_warning) == ("The check third (raises) failed itself.", True)
    assert not list(all_checks.broken_off("works", found["works"], "node1", 0.5))


def test_checks_run_in_a_process_with_more_than_1024_open_files() -> None:
    """A training with many loader workers has them; select(2) refuses their numbers."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(2048, before[0]), before[1]))
    opened = [os.dup(0) for _ in range(1024)]
    try:
        running = all_checks.Running({"works": lambda: [["yes"]]})
        assert running.results(10.0) == {"works": all_checks.CheckResult([["yes"]])}
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("address", "by", "is_found"), [
    ("127.0.0.1", "file", False),  # any of its own addresses
    ("198.51.100.9", "file", True),
    ("198.51.100.9", "tcp", False),  # it has reached rank 0 there
])  # fmt: skip
def test_a_master_is_elsewhere_if_the_address_is_not_rank_0s(address: str, by: str, is_found: bool) -> None:
    those = reports({"master": ["127.0.0.1"]}, {}, {"master": [address]}, {})
    those[2] |= {"by": by, "sent_at": 0, "received_at": 0}
    assert [one.check for one in comparison.differences(TOPOLOGY, those)] == ["other_master"] * is_found


@pytest.mark.parametrize(("host", "is_found"), [("node1.cluster.example", False), ("node2", True)])
def test_rank_0s_own_name_may_mean_loopback_there(host: str, is_found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's 127.0.1.1; the host's name may have a domain."""
    monkeypatch.setattr(network_setup.socket, "gethostname", lambda: host)
    monkeypatch.setattr(network_setup, "addresses_of", lambda name: ["127.0.1.1"])
    assert bool(list(network_setup.master_address.function(site()))) == is_found


def test_nodes_that_few_others_miss_are_not_blamed() -> None:
    """Where one of four nodes speaks, the way to it is rather at fault."""
    four = replace(TOPOLOGY, nodes=("node1", "node2", "node3", "node4"), num_nodes=4)
    (most,) = comparison.missing(four, 4, {1: {"host": "node2"}}, 3, {})
    assert not most.sick_nodes and "--exclude" not in most.hint
    (few,) = comparison.missing(four, 4, {rank: {"host": f"node{rank + 1}"} for rank in range(3)}, 3, {})
    assert few.sick_nodes == ("node4",) and "--exclude=node4" in few.hint


@pytest.mark.parametrize(("node", "is_blamed"), [("node1", True), ("node2", False)])
def test_of_two_halves_the_one_with_the_batch_host_blames_the_other(node: str, is_blamed: bool) -> None:
    reports = {rank: {"host": node} for rank in ((0, 1) if node == "node1" else (2, 3))}
    two = replace(TOPOLOGY, nodes=("node1", "node2"), num_nodes=2, world_size=4)
    (found,) = comparison.missing(two, 4, reports, 3, {"SLURM_JOB_NODELIST": "node[1-2]"})
    assert bool(found.sick_nodes) == ("--exclude" in found.hint) == is_blamed


@pytest.mark.parametrize(("by", "is_warning"), [("file", False), ("tcp", True)])
def test_another_master_port_is_an_error_if_rank_0_is_not_reached(by: str, is_warning: bool) -> None:
    those = reports(*({"master_variables": {"MASTER_PORT": str(20000 + rank)}} for rank in range(4)))
    those[3] |= {"by": by, "sent_at": 0, "received_at": 0}
    (*_, last) = found = comparison.differences(TOPOLOGY, those)
    assert {(one.check, one.is_warning) for one in found} == {("master_variables", is_warning)}
    assert last.what == "MASTER_PORT is not the same on all ranks." and "MASTER_PORT=20003" in last.evidence


def test_one_node_with_another_version_is_found() -> None:
    """Two values are enough; what is the same everywhere is left out."""
    those = reports(*({"versions": {"Python": "3.12.1", "torch": torch}} for torch in ("2.4", "2.4", "2.5", "2.5")))
    found = comparison.differences(TOPOLOGY, those)
    assert {(one.what, one.is_warning) for one in found} == {("Nodes run different versions of torch.", False)}
    assert {(one.host, one.evidence) for one in found} == {("node1", "torch 2.4"), ("node2", "torch 2.5")}


def addresses(stack: str, *own: str) -> dict[str, Any]:
    return {"address": own[0], "addresses": ["127.0.0.1", "172.17.0.1", *own], "stack": stack}


@pytest.mark.parametrize(("third", "is_found"), [
    (addresses("b", "10.0.0.2"), False),
    (addresses("b", "10.0.0.2", "10.0.0.1"), True),  # a second address of an interface
    (addresses("b", "10.0.0.1"), True),
    (addresses("a", "10.0.0.1"), False),  # two of Slurm's nodes on one machine
])  # fmt: skip
def test_an_address_that_two_nodes_have(third: dict[str, Any], is_found: bool) -> None:
    found = comparison.differences(TOPOLOGY, reports(addresses("a", "10.0.0.1"), {}, third, {}))
    assert [one.check for one in found] == ["same_address"] * 2 * is_found
    assert all(one.evidence == "10.0.0.1" for one in found)


@pytest.mark.parametrize(
    ("failures", "kind", "evidence", "hint"),
    [
        ({"20000": "refused", "20001": "filtered"}, "filtered", "port 20000: refused, 20001: filtered", "a firewall"),
        ({"20000": "refused"}, "refused", "port 20000: refused", "nothing listens there"),
        ({}, "no answer", "port unknown", "set another MASTER_PORT"),
    ],
)
def test_how_a_rank_fails_to_connect_is_named(failures: dict[str, str], kind: str, evidence: str, hint: str) -> None:
    """Where one port is refused, and another fails in another way, that is the cause."""
    found = connecting.no_way(3, {"host": "node2", "failures": failures}, "node1")
    assert (found.check, found.ranks, found.host) == ("way_to_rank_0", (3,), "node2")
    assert found.what == f"Ranks can't connect to rank 0's host, node1: {kind}."
    assert found.evidence == evidence and found.hint.startswith(hint)


def test_ranks_that_do_not_exist_are_not_waited_for() -> None:
    env, reports = {"SLURM_STEP_NUM_TASKS": "4"}, {rank: {"host": f"node{rank // 2 + 1}"} for rank in range(4)}
    (found,) = comparison.missing(replace(TOPOLOGY, launcher="manual", world_size=6), 6, reports, 3, env)
    assert found.what.startswith("WORLD_SIZE=6, but this step has 4 tasks:") and "--ntasks=6" in found.hint
    (found,) = comparison.missing(replace(TOPOLOGY, launcher="torchrun", world_size=6), 6, reports, 3, env)
    assert found.what.startswith("2 of 6 ranks did not report within 3 s: ")


def test_a_line_that_was_cut_off_is_left_out() -> None:
    reading, writing = os.pipe()
    words = ["sh", "-c", """printf '{"item": 1}\\n{"it'"""]
    pid = os.posix_spawn("/bin/sh", words, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, writing, 1)])
    os.close(writing)
    found = all_checks._result(pid, reading, time.monotonic() + 10)
    assert found == all_checks.CheckResult([1], failure="its process ended: exit status 0")


def test_results_are_read_without_a_free_descriptor() -> None:
    """The rest of a node's limit may be held by what its checks have opened."""
    limit, taken = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    running = all_checks.Running({"one": lambda: [["yes"]], "other": lambda: [["no"]]})
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, limit[0]), limit[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        found = running.results(scaled(5))
    finally:
        for one in taken:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert found == {"one": all_checks.CheckResult([["yes"]]), "other": all_checks.CheckResult([["no"]])}
