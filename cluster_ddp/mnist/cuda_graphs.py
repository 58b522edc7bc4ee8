"""A step as a CUDA graph: launched as one, instead of kernel by kernel.

Kernels of a small model take less time than the CPU needs to launch them. See CUDA Graphs in PyTorch's CUDA semantics
(docs.pytorch.org/docs/stable/notes/cuda.html), which also lists what a captured function must not do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from cluster_ddp import DeviceError, World

# In its first ten steps DDP times itself, with events that can't be captured.
_WARM_UPS = 11
STEPS_TO_CAPTURE = _WARM_UPS + 2
"""Number of steps after which the graphs are replayed, if all batches are full."""

# NCCL can't destroy a communicator while a graph that uses it is alive: see `reset_all`.
_alive: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()


def prepare(world: World) -> None:
    """Put all further work of this thread on a stream that can be captured. Call it before the model is made.

    Raises:
        DeviceError: this rank computes on no GPU.
    """
    device = world.device
    if device.type != "cuda":
        raise DeviceError("CUDA graphs (--cuda-graph):", f"this rank computes on {device}.", "leave the option out")
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # earlier work may still be running
    torch.cuda.set_stream(stream)
    world.watch_stream(stream)
    world.before_leaving(reset_all)


class Graphed:
    """Runs a function of tensors: at first as it is, later as a CUDA graph.

    The first 11 calls run the function itself, since libraries initialise themselves in them. The first full batch
    after them is captured. It and every later full batch are replayed. Random numbers are the same as without a graph.
    Python's numbers are frozen at the capture: what changes must be a tensor.

    Args:
        function: what to capture. Its results must be in tensors that stay where they are in memory. It must not wait
            for the device.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        self._function, self._warm_ups = function, _WARM_UPS
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._replay: Callable[[], None] | None = None

    def __call__(self, *inputs: torch.Tensor, full_batch: bool = True) -> None:
        """Run it on the current stream. What it returns is dropped.

        Args:
            inputs: tensors of the same shapes in every full batch.
            full_batch: whether every rank has a batch of the full size. It must be the same on all ranks: NCCL does not
                support a collective that some ranks replay and others launch.
        """
        if self._warm_ups > 0 or not full_batch:
            self._warm_ups -= 1
            self._function(*inputs)
            return
        if self._replay is None:
            self._inputs = tuple(tensor.clone() for tensor in inputs)
            self._replay = captured(self._function, self._inputs)
        for mine, given in zip(self._inputs, inputs):
            assert mine.shape == given.shape, "full batches of different sizes"
            mine.copy_(given)
        self._replay()


def captured(function: Callable[..., object], inputs: tuple[torch.Tensor, ...]) -> Callable[[], None]:
    """Capture what the function launches, without running it. Returns what replays the graph."""
    graph = torch.cuda.CUDAGraph()
    _alive.add(graph)
    # "thread_local": the thread that pins a loader's batches calls CUDA while this one captures.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        function(*inputs)
    return graph.replay


def reset_all() -> None:
    """Reset all graphs: they can't be replayed any more. The device must have finished its work.

    ncclCommDestroy and ncclCommAbort wait, without a limit, for the end of every graph that has captured the
    communicator (NCCL 2.30, init.cc, localPersistentRefs; pytorch#115388).
    """
    for graph in list(_alive):
        graph.reset()
    _alive.clear()
