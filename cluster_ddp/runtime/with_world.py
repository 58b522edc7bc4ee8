"""What a submitted function is called through: it gets the world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WithWorld:
    """A function that joins the world and hands it to another function, as its first argument."""

    function: Callable[..., Any]

    def __call__(self, **values: str) -> Any:
        """Call it in every rank; `values` are an array task's of its grid. Errors as of `distributed`."""
        from cluster_ddp.runtime.distributed import distributed  # torch, in the job only

        with distributed() as world:
            return self.function(world, **values)

    def __repr__(self) -> str:
        return (
            f"{getattr(self.function, '__module__', '')}.{getattr(self.function, '__qualname__', self.function)}(world)"
        )
