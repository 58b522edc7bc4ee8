"""What a script makes anew after a resume, and otherwise than when the training began.

Arrays that the loop reads, made from weights that have trained since. Weights of modules that initialize them from the
first batch, by a flag that no checkpoint has (Glow's ActNorm): the flag is as the script has made it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cluster_ddp.runtime.checkpoint.exactness.module_settings import OF_TORCH
from cluster_ddp.runtime.checkpoint.exactness.script_state import ScriptState
from cluster_ddp.runtime.model.dtensor_pieces import local_part


class MadeAnew:
    """Both, in a training with these modules, by name; `script` has its arrays."""

    def __init__(self, modules: Mapping[str, torch.nn.Module], script: ScriptState) -> None:
        self._modules, self._script = modules, script
        self._of_run: Mapping[str, str] | None = None
        self._first_batch: _FirstBatch | None = None

    def resume(self, arrays: Mapping[str, str]) -> None:
        """Call it after a resume, before `begin`, with the `arrays` of the run."""
        self._of_run = arrays

    def begin(self) -> None:
        """Call it when the loop begins."""
        if self._of_run is not None:
            self._first_batch = _FirstBatch(self._modules)

    @property
    def arrays(self) -> Mapping[str, str]:
        """Digests of the arrays that the loop reads and no part has, as it began at first: for the checkpoint."""
        return self._script.arrays if self._of_run is None else self._of_run

    def others(self) -> list[str]:
        """Return the places of arrays that were others when the training began."""
        before, now = self._of_run or {}, self._script.arrays
        return [place for place in sorted(before.keys() & now.keys()) if before[place] != now[place]]

    def initialized(self) -> list[str]:
        """Return the flags of modules that have initialized their weights in the first batch after the resume."""
        return [] if self._first_batch is None else self._first_batch.written

    def leave(self) -> None:
        """Call it when the loop has ended."""
        if self._first_batch is not None:
            self._first_batch.leave()


class _FirstBatch:
    """Watches modules from now to the first step of any optimizer. Call `leave` if none may come."""

    def __init__(self, parts: Mapping[str, torch.nn.Module]) -> None:
        self._before = [
            (".".join(filter(None, (part, path))), module, flags, _contents(module))
            for part, model in parts.items()
            for path, module in model.named_modules()
            if (flags := _flags(module))  # to add up all weights would take time
        ]
        self.written: list[str] = []
        """Flags of modules that have written to their own weights until then."""
        self._hook = register_optimizer_step_pre_hook(self._look)

    def leave(self) -> None:
        """End the watch: torch keeps the hook, and with it the modules."""
        self._hook.remove()
        self._before = []

    def _look(self, *_: object) -> None:
        for place, module, flags, contents in self._before:
            changed = {name for name, value in _flags(module).items() if flags.get(name, value) is not value}
            if changed and _contents(module) != contents:
                self.written += [f"{place}.{name}" for name in sorted(changed)]
        self.leave()


def _flags(module: torch.nn.Module) -> dict[str, bool | None]:
    own = {name: value for name, value in vars(module).items() if isinstance(value, bool | None)}
    return {name: value for name, value in own.items() if name not in OF_TORCH}


def _contents(module: torch.nn.Module) -> list[tuple[int, str]]:
    """How often each of a module's own parameters and buffers was written, and its sum: `.data` counts no writing."""
    own = [local_part(one).detach() for one in (*module.parameters(recurse=False), *module.buffers(recurse=False))]
    return [(one._version, str(one.sum(dtype=torch.float64).item()) if one.is_floating_point() else "") for one in own]
