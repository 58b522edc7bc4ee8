"""Leaves torch.compile's tracer (torch._dynamo) out of a process until something compiles.

Optimizers, DistributedDataParallel and deterministic algorithms import it only to say that they are not to be traced,
or to pass a setting on: 900 modules, two fifths of the CPU time of a short training. What else asks for it, gets it.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # each Python imports this module: it imports nothing more
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_DYNAMO, _INDUCTOR = "torch._dynamo", "torch._inductor.config"


class _Lazy:
    """Stands for a module until an attribute is asked for that it has not."""

    def __init__(self, name: str, **attributes: object) -> None:
        self._name = name
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        from importlib import import_module

        return getattr(import_module(self._name), name)


def _lazy_compile(module: ModuleType) -> None:
    """In torch._compile: where there is no tracer, what it must not trace needs no wrapper."""
    from functools import partial, wraps

    disable = module._disable_dynamo

    def disabled(fn: Callable[..., Any] | None = None, recursive: bool = True) -> Any:
        if fn is None:
            return partial(disabled, recursive=recursive)
        untraced = disable(fn, recursive)

        @wraps(fn)
        def inner(*args: Any, **kwargs: Any) -> Any:
            return (untraced if _DYNAMO in sys.modules else fn)(*args, **kwargs)

        return inner

    module._disable_dynamo = disabled  # type: ignore[attr-defined]
    utils = _Lazy(f"{_DYNAMO}.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")  # DDP asks
    sys.modules["torch"]._dynamo = _Lazy(_DYNAMO, utils=utils)  # type: ignore[attr-defined]


def _lazy_optimizer(module: ModuleType) -> None:
    """In torch.optim.optimizer: where there is no tracer, a step needs no breaks in its graph."""
    from functools import wraps

    breaking = module._use_grad_for_differentiable

    def decorated(step: Callable[..., Any]) -> Callable[..., Any]:
        traced = breaking(step)

        @wraps(step)
        def inner(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _DYNAMO in sys.modules:
                return traced(self, *args, **kwargs)
            with module.torch.set_grad_enabled(self.defaults["differentiable"]):
                return step(self, *args, **kwargs)

        return inner

    module._use_grad_for_differentiable = decorated  # type: ignore[attr-defined]


def _lazy_setting(module: ModuleType) -> None:
    """In torch: where there is no compiler, it need not know at once that algorithms are to be deterministic."""
    from functools import wraps

    tell = module.use_deterministic_algorithms

    @wraps(tell)
    def inner(mode: bool, *, warn_only: bool = False) -> None:
        if _INDUCTOR in sys.modules:
            tell(mode, warn_only=warn_only)
        else:
            module._C._set_deterministic_algorithms(mode, warn_only=warn_only)

    module.use_deterministic_algorithms = inner  # type: ignore[attr-defined]


def _told_late(module: ModuleType) -> None:
    """In torch._inductor.config: what it has not been told."""
    module.deterministic = sys.modules["torch"].are_deterministic_algorithms_enabled()  # type: ignore[attr-defined]


def _not_loaded(module: ModuleType) -> None:
    """In what forks ranks, or waits to become one: it need not import the tracer for them."""
    for names in ("TORCH_MODULES", "MODULES"):
        setattr(module, names, tuple(name for name in getattr(module, names) if name != _DYNAMO))


_CHANGES: dict[str, Callable[[ModuleType], object]] = {
    "torch": _lazy_setting,
    "torch._compile": _lazy_compile,
    "torch.optim.optimizer": _lazy_optimizer,
    _INDUCTOR: _told_late,
    "cluster_ddp.runtime.fork.forked_program": _not_loaded,
}


class _Finder:
    """Makes the changes to the modules when they are imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _CHANGES:
            return None
        from importlib.util import find_spec

        change = _CHANGES.pop(name)
        spec = find_spec(name)
        if spec is None or spec.loader is None:  # it is not installed
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def use(then: Callable[[], object]) -> None:
    """Do so in this process; call `then` when torch is imported."""
    change = _CHANGES["torch"]
    _CHANGES["torch"] = lambda module: (change(module), then())
    sys.meta_path.insert(0, _Finder())
