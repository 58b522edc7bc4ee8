"""The parts of a training: whatever has a state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Protocol, cast

from cluster_ddp.errors import SpecError


class Stateful(Protocol):
    """Anything with a state: a model, an optimizer, a scheduler, a grad scaler."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state, of tensors and plain values."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Load a state of `state_dict`."""


class ScriptVariables:
    """Variables of the script as a part, such as the best loss: what a namespace has."""

    def __init__(self, namespace: SimpleNamespace) -> None:
        self._namespace = namespace

    def state_dict(self) -> dict[str, Any]:
        """Return them by name."""
        return {**vars(self._namespace)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace them by those of `state_dict`."""
        vars(self._namespace).clear()
        vars(self._namespace).update(state_dict)


def as_part(name: str, given: object) -> Stateful:
    """Return a part with its state.

    Raises:
        SpecError: it has none.
    """
    if isinstance(given, SimpleNamespace):
        return ScriptVariables(given)
    if not (hasattr(given, "state_dict") and hasattr(given, "load_state_dict")):
        found = f"it is a {type(given).__name__}, which has no state_dict() and load_state_dict(state)."
        hint = "keep variables of the script in a part: types.SimpleNamespace(best=0.0)"
        raise SpecError(f"Saving the part {name!r}:", found, hint)
    return cast(Stateful, given)
