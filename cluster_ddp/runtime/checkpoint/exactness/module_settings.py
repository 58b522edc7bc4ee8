"""What a script sets in a model as it trains, and no state_dict has: which parameters train, and plain attributes.

Such as layers that are frozen from the third epoch on, a dropout that grows, a temperature that falls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from cluster_ddp.runtime.contents import PLAIN, content_of
from cluster_ddp.runtime.data.first_steps import FirstSteps

_MODE = "training"

OF_TORCH = vars(torch.nn.Module()).keys()
"""The registers that each module has."""

Settings = dict[str, bool | float | str | None]
"""Each by its place, as "model.head.weight.requires_grad" or "model.drop.p"."""


class ModuleSettings:
    """Those of the modules among these parts. Make it before the training's loop, with the script's own settings."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._modules = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}
        self._made: dict[str, tuple[MutableMapping[str, Any], str, Any]] = {}  # plain ones
        self._contents: dict[str, tuple[MutableMapping[str, Any], str, object]] = {}  # of others
        for place, owner, name in self._attributes():
            value = _plain(owner[name])
            if isinstance(value, PLAIN):
                self._made[place] = owner, name, value
            elif name not in OF_TORCH and not isinstance(value, tuple) and (found := content_of(value)) is not None:
                self._contents[place] = owner, name, found
        self._places, self._noted = self._made_of(), self._notes()
        self._trained = {place: parameter.requires_grad for place, parameter in self._parameters()}
        self._loaded: Settings | None = None
        self._lost: Settings = {}
        self.first_steps = FirstSteps()
        """Flags, counts and texts that had changed after the first steps of the run."""

    def changed(self) -> Settings:
        """Return those that are other ones than at first: whether parameters train, and plain attributes."""
        found: Settings = {
            f"{place}.requires_grad": parameter.requires_grad
            for place, parameter in self._parameters()
            if self._trained.get(place, parameter.requires_grad) != parameter.requires_grad
        }
        return found | self._lost | dict(self._changed_attributes())

    def unsaved(self) -> list[str]:
        """Return the places of others: tensors that are no buffers, arrays, containers, generators, up to some size.

        Also attributes of parameters.
        """
        contents = self._contents.items()
        found = [place for place, (owner, name, before) in contents if content_of(owner.get(name)) != before]
        made = [(place, _plain(owner.get(name))) for place, (owner, name, value) in self._made.items() if value is None]
        found += [place for place, now in made if not isinstance(now, PLAIN) and content_of(now) is not None]
        return found + [place for place, value in self._notes().items() if self._noted.get(place) != value]

    def lost(self) -> list[str]:
        """Return, once after `load`, which flags, counts and texts had other values then, and are as at first.

        They are not restored: they may belong to a cache, which is as new as the process.
        """
        lost, self._lost = self._lost, {}
        made = ((place, self._made[place]) for place in lost if place in self._made)
        places = [place for place, (owner, name, value) in made if _plain(owner.get(name, value)) == value]
        saved = self._loaded or {}
        return [f"{place} = {saved[place]!r}" for place in [*places, *self.first_steps.repeated()] if place in saved]

    def note_step(self, *, begins_epoch: bool) -> None:
        """Call it after each step: of an epoch's first ones, flags, counts and texts are noted."""
        if begins_epoch:
            self.first_steps.begin_epoch()
        if not self.first_steps.are_over:
            changed = self._changed_attributes()
            self.first_steps.note({place: value for place, value in changed if not _is_restored(place, value)})

    def replaced(self) -> list[str]:
        """Return the places of modules that are others than at first or have other hooks, and of renamed parameters."""
        now = self._made_of()
        return [place for place in {**self._places, **now} if self._places.get(place) != now.get(place)]

    def load(self, changed: Settings) -> None:
        """Set these as they were when they were saved, by `changed`; the others as at first."""
        self._loaded = changed
        self._lost = {
            place: value for place, value in changed.items() if place in self._made and not _is_restored(place, value)
        }
        self.reload()

    def reload(self) -> None:
        """Do so again, if it was done."""
        if self._loaded is None:
            return
        changed = self._loaded
        for place, parameter in self._parameters():
            wanted = bool(changed.get(f"{place}.requires_grad", self._trained.get(place, parameter.requires_grad)))
            if parameter.requires_grad != wanted:
                parameter.requires_grad_(wanted)
        for place, (owner, name, value) in self._made.items():
            if _is_restored(place, value):
                owner[name] = changed.get(place, value)

    def _changed_attributes(self) -> Iterator[tuple[str, Any]]:
        for place, (owner, name, value) in self._made.items():
            now = _plain(owner.get(name, value))
            if isinstance(now, PLAIN) and (type(now), now) != (type(value), value):
                yield place, now

    def _made_of(self) -> dict[str, object]:
        """Each module and its number of hooks by its place, and True for a parameter: FSDP makes it anew."""
        found: dict[str, object] = {place: True for place, _ in self._parameters()}
        for part, model in self._modules.items():
            for path, module in model.named_modules():
                hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
                found[".".join(filter(None, (part, path)))] = module, hooks
        return found

    def _notes(self) -> dict[str, object]:
        """What attributes of parameters have, but for those of libraries."""
        return {
            f"{place}.{name}": content_of(value)
            for place, parameter in self._parameters()
            for name, value in vars(parameter).items()
            if not name.startswith("_")
        }

    def _attributes(self) -> Iterator[tuple[str, MutableMapping[str, Any], str]]:
        """Each attribute of a module: its place, the module's dictionary, and its name there."""
        for part, model in self._modules.items():
            for path, module in model.named_modules():
                for name in [*vars(module)]:
                    yield ".".join(filter(None, (part, path, name))), vars(module), name

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for part, model in self._modules.items():
            for path, parameter in model.named_parameters():
                yield f"{part}.{path}", parameter


def _plain(value: object) -> object:
    """The value; in place of a function or a class its name, as of an activation that is replaced."""
    return f"a {value.__qualname__}" if isinstance(value, type | FunctionType | BuiltinFunctionType) else value


def _is_restored(place: str, value: object) -> bool:
    return isinstance(value, float) or place.endswith(f".{_MODE}")
