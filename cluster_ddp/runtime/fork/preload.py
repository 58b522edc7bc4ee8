"""What ranks import, imported once, before they are forked; and the state that must not be forked."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cluster_ddp.contract import Env
from cluster_ddp.errors import ForkError

MODULES = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "torch._dynamo",  # the first use of an optimizer imports it
    "cluster_ddp.runtime.checkpoint.checkpointer",
    "cluster_ddp.runtime.finite",
    "cluster_ddp.runtime.progress_bar",
    "cluster_ddp.runtime.distributed",
    "importlib.resources.readers",
    "tyro",
)
"""What a rank of a training imports in any case, or `cluster_ddp.train` does."""

OPTIONAL_MODULES = ("typeguard",)
"""What one of them imports where it is installed."""

# numpy's OpenBLAS starts its threads when it is loaded; the first of these that is set says how many.
_BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
_DRIVERS = ("/dev/nvidia-uvm", "/dev/kfd")
_BLAS_SET_THREADS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")


def load(more: Sequence[str] = ()) -> None:
    """Import `MODULES` and, after them, `more`, which must be there.

    Raises:
        ForkError: one of `more` can't be imported; or one has started threads or initialised CUDA, which a forked
            process could not use.
    """
    gc.disable()  # a sixth of the time would go into looking for garbage
    with _kept_environ():
        os.environ[_BLAS_THREADS[0]] = "1"
        # A module may ask torch.cuda.is_available(): by default that starts CUDA, which no forked process can use then.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        for name in MODULES:
            importlib.import_module(name)
        for name in OPTIONAL_MODULES:
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(name)
        for name in more:
            _import(name)
    gc.freeze()  # what is there now stays in memory that the ranks share
    gc.enable()
    _check()


def reinit_after_fork(cpus: int) -> None:
    """In a rank, make the modules as those of a process that was started on `cpus` CPUs: threads and random numbers.

    Python's own random numbers are seeded anew by os.fork.
    """
    import torch

    torch.default_generator.seed()  # of the CPU; those of GPUs start with the same seed in every process
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if not os.environ.get("OMP_NUM_THREADS") and torch.get_num_threads() != cpus:
        torch.set_num_threads(cpus)
    said = next((value for name in _BLAS_THREADS if (value := os.environ.get(name, "")).isdigit()), None)
    _set_blas_threads(int(said or cpus))


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise ForkError(f"Importing {name} before the ranks are forked:", found, f"change {Env.PRELOAD}") from error


@contextmanager
def _kept_environ() -> Iterator[None]:
    """Take back what the body, or an import in it, changes in the environment."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _set_blas_threads(count: int) -> None:
    if count == 1:  # as it is
        return
    maps = Path("/proc/self/maps").read_text().splitlines()
    for path in {line.split(maxsplit=5)[5] for line in maps if "openblas" in line}:
        library = ctypes.CDLL(path)
        for name in _BLAS_SET_THREADS:
            if hasattr(library, name):
                getattr(library, name)(count)
                break


def _check() -> None:
    import torch

    asked, elsewhere = "Forking the ranks:", "a task for each rank needs no forking: --launcher srun"
    if torch.cuda.is_initialized() or (device := _open_driver(Path("/proc/self/fd"))):
        seen = "" if torch.cuda.is_initialized() else f" ({device} is open)"
        found = f"a module has initialised the GPU's driver{seen}, and a forked process can't use it."
        raise ForkError(asked, found, f"leave that module out of {Env.PRELOAD}; or {elsewhere}")
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        found = f"importing torch has started {threads - 1} threads, which forked processes would not have."
        raise ForkError(asked, found, elsewhere)


def _open_driver(descriptors: Path) -> str | None:
    """The device file that a process has open once it has initialised CUDA or HIP, whoever in it did so; None if not.

    NVML, which only asks for the number of GPUs, opens others (/dev/nvidiactl, /dev/nvidia0).
    """
    for descriptor in descriptors.iterdir():
        with contextlib.suppress(OSError):  # the folder's own, gone by now
            if (target := str(descriptor.readlink())) in _DRIVERS:
                return target
    return None
