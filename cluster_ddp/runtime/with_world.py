"""Calls a submitted function with the world as its first argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WithWorld:
    """A callable that joins the world and calls a function with it as the first argument."""

    function: Callable[..., Any]

    def __call__(self, **values: str) -> Any:
        """Call the function in this rank, with the values of this array task in its grid, and return its result.

        Raises:
            ClusterDDPError: see `distributed`; and whatever the function raises.
        """
        from cluster_ddp.runtime.distributed import distributed  # torch, in the job only

        with distributed() as world:
            return self.function(world, **values)

    def __repr__(self) -> str:
        function = self.function
        return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}(world)"
