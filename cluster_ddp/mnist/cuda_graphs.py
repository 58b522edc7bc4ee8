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


class CudaGraphs:
    """Makes functions of a training step into CUDA graphs. Make it before the model.

        graphs = CudaGraphs(world)
        model = world.wrap(Model())
        backward = graphs(forward_and_backward)  # a function of images and labels
        for images, labels in shard:
            backward(images, labels, full_batch=shard.is_full_batch)

    All further work of this thread is put on a stream that can be captured. The graphs are reset before the ranks leave
    the world: NCCL can't destroy a communicator while a graph that uses it is alive.

    Args:
        world: of the ranks.

    Raises:
        DeviceError: this rank computes on no GPU.
    """

    def __init__(self, world: World) -> None:
        device = world.device
        if device.type != "cuda":
            found, hint = f"this rank computes on {device}.", "leave them out (of cluster-ddp train: --cuda-graph)"
            raise DeviceError("Capturing steps in CUDA graphs:", found, hint)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))  # earlier work may still be running
        torch.cuda.set_stream(stream)
        world.watch_stream(stream)
        self._alive: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        world.before_leaving(self.reset)

    def __call__(self, function: Callable[..., object]) -> GraphedFunction:
        """Return a function that runs this one: at first as it is, later as a CUDA graph.

        Args:
            function: of tensors. Its results must be in tensors that stay where they are in memory. It must not wait
                for the device.
        """
        return GraphedFunction(function, self.captured)

    def captured(self, function: Callable[..., object], inputs: tuple[torch.Tensor, ...]) -> Callable[[], None]:
        """Capture what the function launches, without running it. Returns what replays the graph."""
        graph = torch.cuda.CUDAGraph()
        self._alive.add(graph)
        # "thread_local": the thread that pins a loader's batches calls CUDA while this one captures.
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            function(*inputs)
        return graph.replay

    def reset(self) -> None:
        """Reset all graphs: they can't be replayed any more. The device must have finished its work.

        ncclCommDestroy and ncclCommAbort wait, without a limit, for the end of every graph that has captured the
        communicator (NCCL 2.30, init.cc, localPersistentRefs; pytorch#115388).
        """
        for graph in list(self._alive):
            graph.reset()
        self._alive.clear()


class GraphedFunction:
    """A function that is captured and replayed; `CudaGraphs` makes it.

    The first 11 calls run the function itself, since libraries initialise themselves in them. The first full batch
    after them is captured. It and every later full batch are replayed. Random numbers are the same as without a graph.
    Python's numbers are frozen at the capture: what changes must be a tensor.
    """

    def __init__(self, function: Callable[..., object], captured: Callable[..., Callable[[], None]]) -> None:
        self._function, self._captured, self._warm_ups = function, captured, _WARM_UPS
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._replay: Callable[[], None] | None = None

    def __call__(self, *inputs: torch.Tensor, full_batch: bool = True) -> None:
        """Run it on the current stream. What it returns is dropped.

        Args:
            inputs: tensors of the same shapes in every full batch.
            full_batch: whether every rank has a batch of the full size (`Shard.is_full_batch`). It must be the same on
                all ranks: NCCL does not support a collective that some ranks replay and others launch.
        """
        if self._warm_ups > 0 or not full_batch:
            self._warm_ups -= 1
            self._function(*inputs)
            return
        if self._replay is None:
            self._inputs = tuple(tensor.clone() for tensor in inputs)
            self._replay = self._captured(self._function, self._inputs)
        for mine, given in zip(self._inputs, inputs):
            assert mine.shape == given.shape, "full batches of different sizes"
            mine.copy_(given)
        self._replay()
