"""Modules that initialize their weights from the first batch, by a flag that no checkpoint has (as Glow's ActNorm).

After a resume, the flag is as the script has made it, so they would do so again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cluster_ddp.runtime.model.dtensor_pieces import local_part


class FirstBatch:
    """Watches modules from now to the first step of any optimizer. Call `leave` if none may come."""

    def __init__(self, parts: Mapping[str, torch.nn.Module]) -> None:
        self._before = [
            (".".join(filter(None, (part, path))), module, _flags(module), _versions(module))
            for part, model in parts.items()
            for path, module in model.named_modules()
        ]
        self.written: list[str] = []
        """Flags of modules that have written to their own weights until then."""
        self._hook = register_optimizer_step_pre_hook(self._look)

    def leave(self) -> None:
        """End the watch: torch keeps the hook, and with it the modules."""
        self._hook.remove()
        self._before = []

    def _look(self, *_: object) -> None:
        for place, module, flags, versions in self._before:
            if _versions(module) != versions:
                changed = {name for name, value in _flags(module).items() if flags.get(name, value) is not value}
                self.written += [f"{place}.{name}" for name in sorted(changed)]
        self.leave()


def _flags(module: torch.nn.Module) -> dict[str, bool | None]:
    own = {name: value for name, value in vars(module).items() if isinstance(value, bool | None)}
    return {name: value for name, value in own.items() if name != "training"}


def _versions(module: torch.nn.Module) -> list[int]:
    """How often each of a module's own parameters and buffers was written."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return [local_part(one)._version for one in own]
