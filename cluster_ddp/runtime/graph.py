"""A step as a CUDA graph: launched as one, instead of kernel by kernel.

Kernels of a small model take less time than the CPU needs to launch them. See CUDA Graphs in PyTorch's CUDA semantics
(docs.pytorch.org/docs/stable/notes/cuda.html), which also tells what a function must not do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cluster_ddp.errors import DeviceError

# DDP takes its own times in the first ten steps, with events that can't be captured.
_WARM_UPS = 11


def prepare(device: torch.device) -> None:
    """To be called before DDP is made: from now on all work of this thread is on a stream that can be captured.

    Raises:
        DeviceError: it is no GPU.
    """
    if device.type != "cuda":
        raise DeviceError("CUDA graphs (--cuda-graph):", f"this rank computes on {device}.", "leave the option out")
    torch.cuda.set_stream(torch.cuda.Stream(device))


class Graphed:
    """A function of tensors, for what it does to tensors that stay where they are in memory; it returns nothing.

    The first calls run it as it is, since libraries set themselves up in them; then it is captured, for inputs of the
    shapes that come just then, and from there on replayed for inputs of these shapes. Random numbers go on as they
    would without. Numbers of Python's are captured as they are: what changes must be a tensor.

    Args:
        function: what to capture. It must not wait for the device.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        self._function, self._warm_ups = function, _WARM_UPS
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._replay: Callable[[], None] | None = None

    def __call__(self, *inputs: torch.Tensor) -> None:
        """Run it, on the current stream."""
        if self._replay is None and self._warm_ups > 0:
            self._warm_ups -= 1
            self._function(*inputs)
            return
        if self._replay is None:
            self._inputs = tuple(tensor.clone() for tensor in inputs)
            self._replay = captured(self._function, self._inputs)
        if any(mine.shape != given.shape for mine, given in zip(self._inputs, inputs)):
            self._function(*inputs)  # the last batch of an epoch
            return
        for mine, given in zip(self._inputs, inputs):
            mine.copy_(given)
        self._replay()


def captured(function: Callable[..., object], inputs: tuple[torch.Tensor, ...]) -> Callable[[], None]:
    """What launches all that the function would, without having run it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        function(*inputs)
    return graph.replay
