"""run.failure_kind: what an error is, by its line in a log and as an exception."""

from __future__ import annotations

import pytest

from cluster_ddp.run import failure_kind

LOST = "RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.2]:33"

LINES = {
    "program": (
        *(f"{name}: x" for name in ("ValueError", "KeyError", "AssertionError", "my.own.DataError", "SystemExit")),
        *("MemoryError", "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x3 and 4x2)", "RuntimeError: x"),
        *("ValueError: uncorrectable ECC error", "torch.AcceleratorError: CUDA error: device-side assert triggered"),
    ),
    "GPU memory": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "torch.cuda.OutOfMemoryError: CUDA out of memory",
        "[rank1]: RuntimeError: CUDA error: out of memory",
    ),
    "GPU": (
        "[rank3]: RuntimeError: NCCL Error 2",
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
    ),
    "GPU hardware": (
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "torch.AcceleratorError: CUDA error: uncorrectable NVLink error detected during the execution",
    ),
    "peer": (
        LOST,
        "torch.distributed.DistNetworkError: Connection reset by peer",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited or there was a",
    ),
    "communication": (
        "RuntimeError: DataLoader worker (pid 71) is killed by signal: Bus error.",
        "torch.distributed.DistBackendError: NCCL error in: x",
        "torch.distributed.DistStoreError: x",
        *(f"{name}: [Errno 104] Connection reset by peer" for name in ("ConnectionResetError", "TimeoutError")),
        "my.ConnectionLostError: x",
    ),
    "system": ("OSError: x", "FileNotFoundError: x", "PermissionError: x"),
    "": (
        *("", "killed by SIGKILL", "its agent was killed", "Exited with exit code 1"),
        "Waiting 600 s for the other ranks: rank 1 on node2 is silent.",
    ),
}


@pytest.mark.parametrize(("line", "kind"), [(line, kind) for kind, lines in LINES.items() for line in lines])
def test_the_kind_of_a_line(line: str, kind: str) -> None:
    """A library's connection to some server is no rank's."""
    assert failure_kind.of_line(line) == kind


class OwnDeviceError(ValueError):
    """Of a script."""


class OwnFileError(FileNotFoundError):
    """Of a script."""


def caused(error: Exception, cause: BaseException) -> Exception:
    """An exception as `raise error from cause` makes it."""
    error.__cause__ = cause
    return error


CIRCLE = caused(OwnDeviceError("x"), OwnDeviceError("y"))
CIRCLE.__cause__ = caused(OwnDeviceError("z"), CIRCLE)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OwnDeviceError("CUDA, it says"), "program"),
        (OwnFileError("x"), "system"),
        (RuntimeError("Connection closed by peer"), "peer"),
        (type("NVMLError_GpuIsLost", (Exception,), {})("GPU is lost"), "GPU hardware"),
        (KeyboardInterrupt(), "program"),
        (caused(OwnDeviceError("x"), RuntimeError("Connection closed by peer")), "peer"),
        (caused(OwnDeviceError("x"), OwnFileError("x")), "system"),
        (caused(OwnFileError("x"), OwnDeviceError("x")), "system"),
        (caused(OwnDeviceError("x"), OwnDeviceError("x")), "program"),
        (CIRCLE, "program"),
    ],
)
def test_the_kind_of_an_exception(error: BaseException, kind: str) -> None:
    """By all its classes, and by its cause: a log has neither."""
    assert failure_kind.of_error(error) == kind
