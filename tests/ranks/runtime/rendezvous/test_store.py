"""Ranks that find each other, and nobody else's; several processes on this machine."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from ranks import job_ids, run_ranks, slurm_step
from slowness import scaled

from cluster_ddp.agent.channel import Lines
from cluster_ddp.errors import DeviceError, RendezvousError
from cluster_ddp.runtime.rendezvous import arrived_ranks, host_setup, port_discovery, store
from cluster_ddp.runtime.rendezvous.port_discovery import run_key
from cluster_ddp.slurm.port import candidates
from cluster_ddp.slurm.topology import Topology
from cluster_ddp.slurm.variables import node_name

TIMEOUT_S = scaled(4.0)
_JOB_IDS = itertools.count(job_ids())


def meet_and_greet() -> None:
    """Meet, and write what everybody says into the store."""
    topology = Topology.from_environ(os.environ)
    start = time.monotonic()
    joined = store.meet(topology, "cpu", timeout_s=float(os.environ.get("TIMEOUT_S", "30")))
    took = time.monotonic() - start
    joined.set(f"greeting/{topology.rank}", f"{topology.job_id}.{topology.rank}")
    greetings = [joined.get(f"greeting/{rank}").decode() for rank in range(topology.world_size)]
    print(f"met {' '.join(greetings)} in {took:.2f} s")
    part(topology, joined)


def part(topology: Topology, joined: torch.distributed.Store) -> None:
    """Rank 0, which serves the store, ends last."""
    joined.set(f"bye/{topology.rank}", "")
    if topology.rank == 0:
        joined.wait([f"bye/{rank}" for rank in range(topology.world_size)])
        time.sleep(0.2)


def meet_under_torchrun() -> None:
    topology = Topology.from_environ(os.environ)
    joined = store.meet(topology, "cpu", timeout_s=scaled(30))
    print(f"restart {arrived_ranks.with_common_restarts(topology, joined).restart_count}")
    part(topology, joined)


def fail_to_meet() -> None:
    from cluster_ddp.errors import RendezvousError

    try:
        store.meet(Topology.from_environ(os.environ), "cpu", timeout_s=TIMEOUT_S)
    except RendezvousError as error:
        print(error)
        raise SystemExit(2) from None


def meet_with_other_devices() -> None:
    """Rank 2's GPUs are not visible; the others have one each."""
    topology = Topology.from_environ(os.environ)
    start = time.monotonic()
    try:
        store.meet(topology, "cpu" if topology.rank == 2 else "cuda", timeout_s=60)
    except DeviceError as error:
        print(error, f"\nafter {time.monotonic() - start:.0f} s")
        raise SystemExit(2) from None


@pytest.mark.fault("a rank has no GPU, the others have one", "the rendezvous refuses it and names rank and node")
def test_a_rank_without_a_gpu_is_refused_by_all_with_its_node(tmp_path: Path, job_id: int) -> None:
    """Else it computes on its CPU, and the others wait for it in NCCL, for ten minutes or for ever."""
    ends = run_ranks(meet_with_other_devices, [slurm_step(rank, 4, job_id=job_id) for rank in range(4)], tmp_path)
    assert [end.exit_code for end in ends] == [2, 2, 2, 2], ends
    for end in ends:
        assert f"rank 2 on {node_name(os.environ)}: cpu. The other 3: cuda." in end.output


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        (["cpu"] * 4, None),
        (["cuda"], None),
        (["cuda", "cpu", "cuda"], "rank 1 on n1: cpu. The other 2: cuda."),
        (["cpu", "cuda"], "rank 0 on n0: cpu. The other 1: cuda."),
        (["cuda"] * 20 + ["cpu"] * 10, "and 2 more. The other 20: cuda."),
    ],
)
def test_odd_devices(kinds: list[str], words: str | None) -> None:
    found = arrived_ranks.odd_devices([(f"n{rank}", kind) for rank, kind in enumerate(kinds)])
    assert found is None if words is None else words in str(found)


@pytest.fixture
def job_id() -> Iterator[int]:
    """A job of its own for each test, whose candidate ports are free just now."""
    for job in _JOB_IDS:
        if all(is_free(port) for port in candidates(job)):
            yield job
            return


def is_free(port: int) -> bool:
    try:
        with socket.create_server(("", port)):
            return True
    except OSError:
        return False


def greeting(job_id: int, world_size: int) -> str:
    return "met " + " ".join(f"{job_id}.{rank}" for rank in range(world_size))


@pytest.mark.quick
def test_ranks_meet(tmp_path: Path, job_id: int) -> None:
    ends = run_ranks(meet_and_greet, [slurm_step(rank, 3, job_id=job_id) for rank in range(3)], tmp_path)
    for end in ends:
        assert end.exit_code == 0, end.output
        assert end.output.startswith(greeting(job_id, 3))


@pytest.mark.parametrize("holder", ["silent", "web server", "bound only", "hangs up"])
def test_a_taken_port_costs_little_and_not_the_job(tmp_path: Path, job_id: int, holder: str) -> None:
    with closing(socket.socket()) as thief:
        thief.bind(("", candidates(job_id)[0]))
        if holder != "bound only":
            thief.listen()
        threading.Thread(target=hold, args=(thief, holder), daemon=True).start()
        ends = run_ranks(meet_and_greet, [slurm_step(rank, 2, job_id=job_id) for rank in range(2)], tmp_path)
    for end in ends:
        assert end.exit_code == 0, end.output
        assert end.output.startswith(greeting(job_id, 2))


def hold(thief: socket.socket, manner: str) -> None:
    connections = []
    while manner in ("web server", "hangs up"):
        try:
            connection, _ = thief.accept()
        except OSError:
            return
        connections.append(connection)
        if manner == "web server":
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 50)
        connection.close()


def test_two_jobs_with_the_same_first_port_never_join_each_other(tmp_path: Path, job_id: int) -> None:
    """Restarts of one job share all candidate ports: the ghost of the run before, and the run itself."""
    environments = [
        slurm_step(rank, 2, job_id=job_id, SLURM_RESTART_COUNT=restart) for restart in "12" for rank in range(2)
    ]
    ends = run_ranks(meet_and_greet, environments, tmp_path)
    for end in ends:
        assert end.exit_code == 0, end.output
        assert end.output.startswith(greeting(job_id, 2))


@pytest.mark.fault(
    "your own torchrun on several nodes (`--max-restarts`): a rank is killed",
    "torchrun restarts all ranks; they meet although its agents have counted different failures, and resume from the "
    "newest checkpoint",
    bound="torchrun's, about 10 s",
)
def test_torchruns_workers_meet_again_though_their_agents_have_counted_different_failures(tmp_path: Path) -> None:
    """Each agent counts those of its own workers. The store of the first one, on MASTER_PORT, outlives all starts."""
    with socket.create_server(("127.0.0.1", 0)) as agents_store:
        run = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agents_store.getsockname()[1]), "WORLD_SIZE": "3"}
        run |= {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        run |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        environments = [
            run | {"RANK": str(rank), "GROUP_RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(restarts)}
            for rank, restarts in enumerate((0, 2, 1))
        ]
        ends = run_ranks(meet_under_torchrun, environments, tmp_path)
    assert [(end.exit_code, end.output.splitlines()[-1]) for end in ends] == [(0, "restart 2")] * 3, ends


def test_a_preset_port_that_is_taken_is_named(tmp_path: Path, job_id: int) -> None:
    with socket.create_server(("", 0)) as thief:
        port = str(thief.getsockname()[1])
        (end,) = run_ranks(fail_to_meet, [slurm_step(0, 2, job_id=job_id, MASTER_PORT=port)], tmp_path)
    assert end.exit_code == 2
    assert f"port {port} on {node_name(os.environ)} is in use" in end.output
    assert "unset MASTER_PORT" in end.output


def test_when_all_candidates_are_taken_they_are_named(tmp_path: Path, job_id: int) -> None:
    thieves = [socket.create_server(("", port)) for port in candidates(job_id)]
    (end,) = run_ranks(fail_to_meet, [slurm_step(0, 2, job_id=job_id)], tmp_path)
    for thief in thieves:
        thief.close()
    assert end.exit_code == 2
    assert all(str(port) in end.output for port in candidates(job_id))


def test_a_missing_rank_is_named_by_all_the_others(tmp_path: Path, job_id: int) -> None:
    environments = [slurm_step(rank, 3, job_id=job_id) for rank in (0, 2)]
    ends = run_ranks(fail_to_meet, environments, tmp_path)
    for end in ends:
        assert end.exit_code == 2, end.output
        assert "2 of 3 ranks arrived; missing: rank 1 (localhost)." in end.output


def fail_to_meet_a_late_rank_0() -> None:
    """Rank 0 starts so late that the others' own time is over before its verdict."""
    store._VERDICT_GRACE_S = 1.0
    if os.environ["SLURM_PROCID"] == "0":
        time.sleep(2 * store._VERDICT_GRACE_S)
    fail_to_meet()


def test_a_missing_rank_is_named_where_rank_0_came_late(tmp_path: Path, job_id: int) -> None:
    environments = [slurm_step(rank, 3, job_id=job_id) for rank in (0, 2)]
    ends = run_ranks(fail_to_meet_a_late_rank_0, environments, tmp_path)
    for end in ends:
        assert end.exit_code == 2, end.output
        assert "2 of 3 ranks arrived; missing: rank 1 (localhost)." in end.output


def test_a_rank_that_is_there_twice_is_refused(tmp_path: Path, job_id: int) -> None:
    environments = [slurm_step(rank, 3, job_id=job_id) for rank in (0, 1, 1)]
    ends = run_ranks(fail_to_meet, environments, tmp_path)
    refused = ["another process has already joined it as rank 1" in end.output for end in ends]
    assert refused.count(True) == 1, ends
    assert not refused[0]


def test_without_rank_0_the_others_say_so(tmp_path: Path, job_id: int) -> None:
    (end,) = run_ranks(fail_to_meet, [slurm_step(1, 2, job_id=job_id)], tmp_path)
    assert end.exit_code == 2, end.output
    assert "rank 1 did not find rank 0 on localhost" in end.output
    assert "connection refused" in end.output


def test_an_address_that_does_not_exist_is_named(tmp_path: Path, job_id: int) -> None:
    place = {"nodelist": "a,b", "SLURM_STEP_NUM_NODES": "2", "MASTER_ADDR": "no-such-host.invalid"}
    (end,) = run_ranks(fail_to_meet, [slurm_step(0, 2, job_id=job_id, **place)], tmp_path)
    assert end.exit_code == 2, end.output
    assert "Looking up no-such-host.invalid" in end.output


class LateStore:
    """A store whose wait times out just before the last rank arrives."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [b"n0 cpu" for _ in keys]

    def wait(self, keys: list[str], timeout: object) -> None:
        raise torch.distributed.DistStoreError

    def check(self, keys: list[str]) -> bool:
        return True


def test_a_rank_that_comes_at_the_last_moment_is_not_missing() -> None:
    topology = Topology.from_environ(slurm_step(0, 6, job_id=1))
    assert store._verdict(topology, LateStore(), 0.0) == "proceed"  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [3000 + 256, 3000])
def test_a_limit_on_open_files_is_named_where_ranks_are_many(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (limit, limit))
    topology = Topology.from_environ(slurm_step(0, 3000, job_id=1))
    named = (
        contextlib.nullcontext() if limit > 3000 else pytest.raises(RendezvousError, match=r"may have 3000 \(ulimit")
    )
    with named:
        store._check_open_files(topology)


def test_a_slow_beacon_is_waited_for_and_not_asked_again(job_id: int) -> None:
    """By a rank of many, for as long as it takes to answer them all."""
    topology = Topology.from_environ(slurm_step(1, 3000, job_id=job_id))
    key, asked = run_key(topology, {}), []
    with socket.create_server(("", candidates(job_id)[0])) as listener, contextlib.ExitStack() as stack:

        def answer_late() -> None:
            asked.append(listener.accept()[0])
            time.sleep(1.0)
            nonces = asked[0].recv(64).strip() + b" 00"
            asked[0].sendall(b"00 " + key.derived("port").mac("channel", nonces) + b"\n")
            asked[0].recv(1000)
            asked[0].sendall(Lines(key.derived("port"), nonces, "server", "task").seal({"port": 12345}))

        thread = threading.Thread(target=answer_late, daemon=True)
        thread.start()
        stack.callback(thread.join)
        assert port_discovery.find_store(topology, key, "127.0.0.1", time.monotonic() + 30) == (12345, "")
    assert len(asked) == 1
    asked[0].close()


def test_where_nobody_listens_the_first_port_is_asked_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(port_discovery, "_ask", lambda address, port, *_: asked.append(port) or "connection refused")
    topology = Topology.from_environ(slurm_step(1, 2, job_id=1))
    port, heard = port_discovery.find_store(topology, run_key(topology, {}), "127.0.0.1", time.monotonic() + 0.5)
    first, *others = candidates(1)
    assert port is None
    assert asked[:5] == [first, first, first, *others[:2]]
    assert all(f"{other}: connection refused" in heard for other in candidates(1))


@pytest.mark.parametrize(("nodes", "is_local"), [(1, True), (2, False)])
def test_what_ranks_of_one_node_serve_is_for_that_node_only(job_id: int, nodes: int, is_local: bool) -> None:
    topology = Topology.from_environ(
        slurm_step(0, 2, job_id=job_id, nodelist="a,b"[: 2 * nodes - 1], SLURM_STEP_NUM_NODES=str(nodes))
    )
    with contextlib.closing(host_setup.bind_first_free(topology)) as listener, socket.socket() as other:
        # To 127.0.0.2 connects who would come over the network, too: what listens on 127.0.0.1 is not there.
        assert (other.connect_ex(("127.0.0.2", listener.getsockname()[1])) != 0) == is_local
