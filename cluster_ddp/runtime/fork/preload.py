"""Imports the modules of the ranks once, before the fork; and checks for state that must not be forked."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cluster_ddp.errors import ForkError
from cluster_ddp.protocol import Env
from cluster_ddp.runtime.device import visible_gpus

MODULES = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "torch._dynamo",  # the first use of an optimizer imports it
    "cluster_ddp.runtime.checkpoint.checkpointer",
    "cluster_ddp.runtime.non_finite",
    "cluster_ddp.runtime.console",
    "cluster_ddp.runtime.distributed",
    "importlib.resources.readers",
)
"""Modules that each rank of a training, or `cluster_ddp.train`, imports."""

# NumPy's OpenBLAS starts its threads when it is loaded; the first of these that is set gives their number.
_BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
_BLAS_SET_THREADS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")


def load(more: Sequence[str] = (), *, forks: bool = True) -> None:
    """Import `MODULES`, then `more`. The environment stays as it is.

    This process `forks` the ranks, or else becomes one, and only waits for that.

    Raises:
        ForkError: one of `more` can't be imported; or a module has initialised CUDA or HIP, or started threads, which a
            forked process could not use.
    """
    gc.disable()  # garbage collection would take a sixth of the time
    with _kept_environ():
        os.environ[_BLAS_THREADS[0]] = "1"
        # A module may call torch.cuda.is_available(). By default that starts CUDA, which a forked process can't use.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        for name in MODULES:
            importlib.import_module(name)
        for name in more:
            _import(name)
    gc.freeze()  # existing objects stay in memory that the ranks share
    gc.enable()
    _check(forks)


def reinit_after_fork(cpus: int) -> None:
    """In a rank with so many CPUs, set threads and random numbers of the modules as in a new process.

    os.fork itself reseeds Python's random numbers.
    """
    import torch

    torch.default_generator.seed()  # the CPU's; those of GPUs start with the same seed in every process
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if not os.environ.get("OMP_NUM_THREADS") and torch.get_num_threads() != cpus:
        torch.set_num_threads(cpus)
    set_blas_threads(cpus)


def set_blas_threads(cpus: int) -> None:
    """In a rank with so many CPUs, set the number of OpenBLAS's threads as in a new process."""
    said = next((value for name in _BLAS_THREADS if (value := os.environ.get(name, "")).isdigit()), None)
    count = int(said or cpus)
    if count == 1:  # unchanged
        return
    maps = Path("/proc/self/maps").read_text().splitlines()
    for path in {line.split(maxsplit=5)[5] for line in maps if "openblas" in line}:
        library = ctypes.CDLL(path)
        for name in _BLAS_SET_THREADS:
            if hasattr(library, name):
                getattr(library, name)(count)
                break


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise ForkError(f"Importing {name} before the ranks are forked:", found, f"change {Env.PRELOAD}") from error


@contextmanager
def _kept_environ() -> Iterator[None]:
    """Undo all changes of the environment in the body."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _check(forks: bool) -> None:
    import torch

    asked, elsewhere = "Forking the ranks:", "start one task per rank, without forking: --launcher srun"
    if torch.cuda.is_initialized() or (device := visible_gpus.open_driver()):
        seen = "" if torch.cuda.is_initialized() else f" ({device} is open)"
        which = "forked process can't use it" if forks else "waiting process must not hold a GPU"
        found = f"a module has initialised the GPU's driver{seen}, and a {which}."
        raise ForkError(asked, found, f"leave that module out of {Env.PRELOAD}; or {elsewhere}")
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1 and forks:
        found = f"importing torch has started {threads - 1} threads, which forked processes would not have."
        raise ForkError(asked, found, elsewhere)
