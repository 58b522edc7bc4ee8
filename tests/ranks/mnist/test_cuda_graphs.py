"""When a function is captured and replayed; the capture itself needs a GPU (see tests/gpu)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import pytest
import torch

import cluster_ddp
from cluster_ddp.mnist import training
from cluster_ddp.mnist.training import CudaGraphs, GraphedFunction
from cluster_ddp.runtime import process_group
from cluster_ddp.runtime.data.device_dataset import DeviceLoader, ResidentSet
from cluster_ddp.runtime.data.shard import DistributedBatchSampler, Shard
from cluster_ddp.runtime.device import interruptible_wait
from cluster_ddp.slurm.topology import Topology


def test_it_runs_then_is_captured_then_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, list[float]]] = []

    def function(values: torch.Tensor) -> None:
        calls.append(("run", values.tolist()))

    def captured(function: Callable[..., None], inputs: tuple[torch.Tensor, ...]) -> Callable[[], None]:
        calls.append(("captured", inputs[0].tolist()))
        return lambda: calls.append(("replayed", inputs[0].tolist()))

    monkeypatch.setattr(training, "_WARM_UPS", 2)
    graphed, first = GraphedFunction(function, captured), torch.tensor([3.0, 3.0])
    rest = torch.tensor([4.0])
    for values in (torch.tensor([1.0]), torch.tensor([2.0, 2.0]), rest, first, rest, torch.tensor([5.0, 5.0])):
        graphed(values, full_batch=len(values) == 2)
    assert calls == [
        ("run", [1.0]),
        ("run", [2.0, 2.0]),
        ("run", [4.0]),  # would be captured if what comes twelfth were
        ("captured", [3.0, 3.0]),
        ("replayed", [3.0, 3.0]),
        ("run", [4.0]),
        ("replayed", [5.0, 5.0]),
    ]
    assert first.tolist() == [3.0, 3.0]  # the caller's tensor is nobody's input to write to


class Cuda:
    """Stands in for CUDA: notes what is asked of it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        calls = self.calls

        class Stream:
            def __init__(self, device: torch.device) -> None:
                pass

            def wait_stream(self, other: object) -> None:
                calls.append(f"wait for {other}")

            def query(self) -> bool:
                return True

        class CUDAGraph:
            def replay(self) -> None:
                calls.append("replay")

            def reset(self) -> None:
                calls.append("reset")

        @contextlib.contextmanager
        def capture(graph: object, *, stream: object, capture_error_mode: str) -> Iterator[None]:
            calls.append(f"capture on {stream} ({capture_error_mode})")
            yield

        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
        patch.setattr(torch.cuda, "graph", capture)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: "the current stream")
        patch.setattr(torch.cuda, "set_stream", lambda stream: calls.append(f"set {type(stream).__name__}"))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    monkeypatch.setattr(interruptible_wait, "watched", [])
    monkeypatch.setattr(process_group, "before_leaving", [])
    return Cuda(monkeypatch)


@pytest.fixture
def graphs(cuda: Cuda) -> CudaGraphs:
    return CudaGraphs(cluster_ddp.World(topology=Topology.from_environ({}), device=torch.device("cuda", 0)))


def test_the_stream_to_capture_on_waits_for_what_was_begun_before(cuda: Cuda, graphs: CudaGraphs) -> None:
    """The world watches it, and resets the graphs before it is left."""
    assert cuda.calls == ["wait for the current stream", "set Stream"]
    assert len(interruptible_wait.watched) == 1
    assert process_group.before_leaving == [graphs.reset]


def test_a_capture_lets_other_threads_call_cuda(cuda: Cuda, graphs: CudaGraphs) -> None:
    """The one that pins a loader's batches does."""
    cuda.calls.clear()
    replay = graphs.captured(lambda: None, ())
    replay()
    assert cuda.calls == ["capture on the current stream (thread_local)", "replay"]


def test_all_graphs_that_are_alive_are_reset_once(cuda: Cuda, graphs: CudaGraphs) -> None:
    """NCCL's communicators end only without them."""
    kept, gone = graphs.captured(lambda: None, ()), graphs.captured(lambda: None, ())
    del gone
    cuda.calls.clear()
    graphs.reset()
    graphs.reset()
    assert cuda.calls == ["reset"]
    assert kept


def test_a_function_of_the_step_is_captured_after_its_warm_up(cuda: Cuda, graphs: CudaGraphs) -> None:
    calls: list[str] = []
    graphed, steps = graphs(lambda _: calls.append("run")), training._WARM_UPS + 2
    cuda.calls.clear()
    for _ in range(steps):
        graphed(torch.zeros(1))
    assert len(calls) == steps - 1  # the capture runs it, too; with CUDA it would only record
    assert cuda.calls == ["capture on the current stream (thread_local)", "replay", "replay"]


@pytest.mark.parametrize(("sizes", "world_size"), [((1437, 64), 8), ((1437, 8), 8), ((100, 8), 8), ((135, 8), 8)])
def test_ranks_replay_the_same_batches_whatever_the_size(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int], world_size: int
) -> None:
    """By its own batch's shape alone a rank would replay one that others, with a sample less, would not."""
    monkeypatch.setattr(training, "_WARM_UPS", 3)
    size, batch_size = sizes
    ways: list[list[str]] = []
    for rank in range(world_size):
        way: list[str] = []
        replayed = functools.partial(way.append, "replayed")
        graphed = GraphedFunction(lambda _, way=way: way.append("launched"), lambda *_, replayed=replayed: replayed)
        batches = DistributedBatchSampler(size, batch_size, rank=rank, world_size=world_size, seed=1)
        dataset = ResidentSet(torch.zeros(size))
        shard = Shard(batches, DeviceLoader(dataset, batches))
        for epoch in range(4):
            shard.set_epoch(epoch)
            for (batch,) in shard:
                graphed(batch, full_batch=shard.is_full_batch)
                assert len(batch) == batch_size or not shard.is_full_batch
        ways.append(way)
    assert all(way == ways[0] for way in ways)
    assert "replayed" in ways[0]
