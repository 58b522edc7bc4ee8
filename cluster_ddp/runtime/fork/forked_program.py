"""The program of the ranks: its modules, imported once, before the fork; and its script, run as `python` would."""

from __future__ import annotations

import builtins
import ctypes
import gc
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import InspectLoader
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import cast

from cluster_ddp.errors import SpecError
from cluster_ddp.runtime.device import binding

TORCH_MODULES = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "torch._dynamo",  # DDP's constructor imports it, and the first use of an optimizer
)
"""Modules of torch that each rank of a training imports."""
MODULES = (
    *TORCH_MODULES,
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


def load(more: Sequence[str] = ()) -> str:
    """Import `MODULES`, then `more`. The environment stays as it is.

    Returns why this process must not be forked now; empty if it may. A module may have initialised CUDA or HIP, or
    started threads, which a forked process could not use.
    """
    gc.disable()  # garbage collection would take a sixth of the time
    with _kept_environ():
        os.environ[_BLAS_THREADS[0]] = "1"
        # A module may call torch.cuda.is_available(). By default that starts CUDA, which a forked process can't use.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        for name in (*MODULES, *more):
            importlib.import_module(name)
    gc.freeze()  # existing objects stay in memory that the ranks share
    gc.enable()
    return _why_not()


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


def _why_not() -> str:
    import torch

    if torch.cuda.is_initialized() or (device := binding.open_driver()):
        seen = "" if torch.cuda.is_initialized() else f" ({device} is open)"
        return f"a module has initialised the GPU's driver{seen}, and a forked process can't use it"
    threads = len(list(Path("/proc/self/task").iterdir())) - 1
    return f"importing torch has started {threads} threads, which forked processes would not have" if threads else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkedProgram:
    """The script or module to run.

    runpy is not used: it removes the module from sys.modules["__main__"] before threads and exit handlers have ended,
    which may need it for pickling.
    """

    name: str
    """Path of the script, or name of the module."""
    is_module: bool
    """Whether it is a module."""
    arguments: tuple[str, ...]
    """The words of sys.argv after the first."""

    @staticmethod
    def parse(words: Sequence[str]) -> ForkedProgram:
        """Read the words after `python` on a command line: "script.py ARGUMENTS …" or "-m module ARGUMENTS …".

        Raises:
            SpecError: the words have another form, or the script does not exist.
        """
        match list(words):
            case ["-m", name, *arguments]:
                return ForkedProgram(name=name, is_module=True, arguments=tuple(arguments))
            case [name, *arguments] if not name.startswith("-"):
                if not Path(name).is_file():
                    found, hint = f"there is no such file in {Path.cwd()}.", "paths are relative to the working folder"
                    raise SpecError(f"Running {name!r} in each rank:", found, hint)
                return ForkedProgram(name=name, is_module=False, arguments=tuple(arguments))
        asked, found = f"Running {list(words)} in each rank:", "this is neither a script nor -m with a module."
        raise SpecError(asked, found, "… -- script.py ARGUMENTS, or -- -m MODULE ARGUMENTS")

    def prepare(self) -> None:
        """Set sys.argv and the first entry of sys.path, as `python` would."""
        sys.argv = ["-m" if self.is_module else self.name, *self.arguments]
        if not getattr(sys.flags, "safe_path", sys.flags.isolated):
            sys.path[0] = str(Path.cwd() if self.is_module else Path(os.path.realpath(self.name)).parent)

    def run(self) -> None:
        """Run the script or module.

        Raises:
            SystemExit: it calls sys.exit; or it raises an exception, which sys.excepthook prints without our frames.
        """
        main = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = builtins
        try:
            code = self._module(main) if self.is_module else self._script(main)
            sys.modules["__main__"] = main
            exec(code, main.__dict__)
        except Exception as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
                trace = trace.tb_next
            sys.excepthook(type(error), error.with_traceback(trace), trace)
            sys.exit(1)

    def _script(self, main: types.ModuleType) -> types.CodeType:
        path = str(Path(self.name).absolute())
        loader = SourceFileLoader("__main__", path)
        main.__file__, main.__loader__ = path, loader
        main.__dict__["__cached__"] = None
        return loader.source_to_code(loader.get_data(path), path)

    def _module(self, main: types.ModuleType) -> types.CodeType:
        spec = importlib.util.find_spec(self.name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{self.name}.__main__")
        code = None if spec is None else cast(InspectLoader, spec.loader).get_code(spec.name)
        if spec is None or code is None:
            raise ImportError(f"No module named {self.name}")
        sys.argv[0] = str(spec.origin)
        main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
        main.__file__ = spec.origin
        main.__dict__["__cached__"] = spec.cached
        return code
