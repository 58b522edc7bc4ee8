"""Run a script or a module in this process as `python` would run it in a new one."""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import InspectLoader
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import cast

from cluster_ddp.errors import SpecError


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
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
    def parse(words: Sequence[str]) -> Target:
        """Read the words after `python` on a command line: "script.py ARGUMENTS …" or "-m module ARGUMENTS …".

        Raises:
            SpecError: the words have another form, or the script does not exist.
        """
        match list(words):
            case ["-m", name, *arguments]:
                return Target(name=name, is_module=True, arguments=tuple(arguments))
            case [name, *arguments] if not name.startswith("-"):
                if not Path(name).is_file():
                    found = f"there is no such file in {Path.cwd()}."
                    raise SpecError(
                        f"Running {name!r} in each rank:", found, "paths are relative to the working folder"
                    )
                return Target(name=name, is_module=False, arguments=tuple(arguments))
        found = "this is neither a script nor -m with a module."
        raise SpecError(
            f"Running {list(words)} in each rank:", found, "… -- script.py ARGUMENTS, or -- -m MODULE ARGUMENTS"
        )

    def prepare(self) -> None:
        """Set sys.argv, and for a script the first entry of sys.path, as `python` would."""
        sys.argv = ["-m" if self.is_module else self.name, *self.arguments]
        if not self.is_module and not getattr(sys.flags, "safe_path", sys.flags.isolated):
            sys.path[0] = str(Path(os.path.realpath(self.name)).parent)

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
