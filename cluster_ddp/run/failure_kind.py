"""What kind of failure an error is (`Kind`), by its classes and its text; signals and losses are known elsewhere."""

from __future__ import annotations

import builtins
import re
from collections.abc import Sequence

from cluster_ddp.run.names import Kind

PEER_IS_GONE = (
    *("connection closed by peer", "connection reset", "broken pipe", "connection refused", "failed to recv"),
    "remote process exit",
)
"""What gloo (transport/tcp: pair.cc, error.cc), torch's store and NCCL (2.18 to 2.21: exited, exiting) say, in small
letters, if another rank is gone."""

RAISED = re.compile(r"(?:\[rank\d+\]: )?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit))\b", re.ASCII)
"""An exception's line in a log, as Python prints it. Torch writes "[rank3]: " before those of a rank."""

_OF_RANKS = re.compile(r"RuntimeError|torch\.distributed\.Dist\w+Error|ncclRemoteError")
_OF_GPUS = re.compile(r"Accelerator|nccl|Cuda|Device")  # parts of a class's name
_OF_COMMUNICATION = re.compile(r"Connection|Timeout|Dist[A-Z]|Rendezvous")
# What a RuntimeError says, which torch raises for all.
_SAYS_GPU = re.compile(r"\b(CUDA|HIP|CUDNN|CUBLAS|NVML|ECC|NCCL|RCCL)", re.IGNORECASE)
_SAYS_COMMUNICATION = re.compile(r"\b(gloo|peer|connections?|refused|timed out|worker \(pid)", re.IGNORECASE)
# Errors of CUDA (cudaErrorECCUncorrectable, cudaErrorNvlinkUncorrectable) and NVML (NVML_ERROR_GPU_IS_LOST) that no
# program causes, and no other process on a healthy GPU.
_GPU_HARDWARE = re.compile(r"uncorrectable (ECC|NVLink) error|GPU is lost|fallen off the bus", re.IGNORECASE)
_GPU_MEMORY = re.compile(r"\b(CUDA|HIP)\b.*\bout of memory", re.IGNORECASE)
_OF_PROGRAM = {"ArithmeticError", "AssertionError", "AttributeError", "LookupError", "TypeError", "ValueError"}
_ASSERT = "device-side assert"  # in a kernel: such as an index that is too large


def of_error(error: BaseException) -> str:
    """Return the kind of an exception; of one that another has caused, that one's, if it says more."""
    seen: list[BaseException] = []  # a cause may be an error's own consequence
    found: str = Kind.PROGRAM
    one = error
    while found == Kind.PROGRAM and one not in seen:
        seen.append(one)
        found = _kind([_shown(kind) for kind in type(one).__mro__], str(one))
        one = one.__cause__ or one
    return found


def of_line(line: str) -> str:
    """Return the kind of an exception by its line in a log, as Python prints it; empty if it is none."""
    raised = RAISED.match(line)
    if raised is None:
        return ""
    kind = getattr(builtins, raised[1], None)
    return _kind([_shown(one) for one in kind.__mro__] if isinstance(kind, type) else [raised[1]], line)


def _shown(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _kind(classes: Sequence[str], text: str) -> str:
    """The kind of an exception: by its class, before the classes of this one, and by its text.

    OSErrors are not the program's own: a file system may be missing on one node.
    """
    name = classes[0].rpartition(".")[2]
    is_torchs = name == "RuntimeError" or classes[0].startswith("torch.")
    if _ASSERT in text or not _OF_PROGRAM.isdisjoint(classes):
        return Kind.PROGRAM
    if name == "OutOfMemoryError" or (is_torchs and _GPU_MEMORY.search(text)):
        return Kind.GPU_MEMORY
    if any(map(_OF_RANKS.fullmatch, classes)) and any(words in text.lower() for words in PEER_IS_GONE):
        return Kind.PEER
    if (is_torchs or name.startswith("NVMLError")) and _GPU_HARDWARE.search(text):
        return Kind.GPU_HARDWARE
    said = text if name == "RuntimeError" else ""
    if _OF_GPUS.search(name) or _SAYS_GPU.search(said):
        return Kind.GPU
    if _OF_COMMUNICATION.search(name) or _SAYS_COMMUNICATION.search(said):
        return Kind.COMMUNICATION
    return Kind.SYSTEM if "OSError" in classes else Kind.PROGRAM
