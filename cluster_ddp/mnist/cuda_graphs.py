"""A step as a CUDA graph: launched as one, instead of kernel by kernel.

Kernels of a small model take less time than the CPU needs to launch them. See CUDA Graphs in PyTorch's CUDA semantics
(docs.pytorch.org/docs/stable/notes/cuda.html), which also tells what a function must not do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from cluster_ddp import DeviceError, World

# DDP takes its own times in the first ten steps, with events that can't be captured.
_WARM_UPS = 11

# NCCL does not let go of a communicator as long as a graph that uses it is alive: see `reset_all`.
_alive: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()


def prepare(world: World) -> None:
    """Put all further work of this thread on a stream that can be captured. Call it before DDP is made.

    Raises:
        DeviceError: this rank computes on no GPU.
    """
    device = world.device
    if device.type != "cuda":
        raise DeviceError("CUDA graphs (--cuda-graph):", f"this rank computes on {device}.", "leave the option out")
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # what is there already may still be on its way
    torch.cuda.set_stream(stream)
    world.watch_stream(stream)
    world.before_leaving(reset_all)


class Graphed:
    """A function of tensors, for what it does to tensors that stay where they are in memory; it returns nothing.

    The first calls run it as it is, since libraries set themselves up in them. The first full batch after them is
    captured, and every full batch from there on is replayed. Random numbers are drawn as they would be without.
    Python's numbers are captured as they are: what changes must be a tensor.

    Args:
        function: what to capture. It must not wait for the device.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        self._function, self._warm_ups = function, _WARM_UPS
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._replay: Callable[[], None] | None = None

    def __call__(self, *inputs: torch.Tensor, full_batch: bool = True) -> None:
        """Run it, on the current stream.

        Args:
            inputs: of the same shapes in every full batch.
            full_batch: whether every rank has a batch of the full size. All ranks must say the same: NCCL does not take
                a collective that some ranks replay and others launch.
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
    """What launches all that the function would, without having run it."""
    graph = torch.cuda.CUDAGraph()
    _alive.add(graph)
    # "thread_local": the thread that pins a loader's batches calls CUDA while this one captures.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        function(*inputs)
    return graph.replay


def reset_all() -> None:
    """Let go of all graphs: they can't be replayed any more. The device must have done its work.

    ncclCommDestroy and ncclCommAbort wait, without a limit, for the end of every graph that has captured the
    communicator (NCCL 2.30, init.cc, localPersistentRefs; pytorch#115388).
    """
    for graph in list(_alive):
        graph.reset()
    _alive.clear()
