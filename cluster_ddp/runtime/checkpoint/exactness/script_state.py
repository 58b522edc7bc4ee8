"""What the script itself keeps from one step to the next, in variables and in objects of its own.

Of the loop around a step, the source says which variables it carries, and what else it reads. That is compared again
at each save: random number generators, containers, objects of the script's classes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import IOBase
from types import BuiltinMethodType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from cluster_ddp.runtime.checkpoint.exactness import loop_variables
from cluster_ddp.runtime.checkpoint.exactness.loop_variables import RepeatedCode
from cluster_ddp.runtime.contents import PLAIN, content_of
from cluster_ddp.runtime.failure.stacks import is_users

_DEPTH = 5  # of objects in objects
_MOST_ITEMS, _LOOKED_AT = 100, 4  # arrays of a container, of a module
_MOST_OBJECTS, _MOST_FUNCTIONS = 1000, 100
_ARRAYS = torch.Tensor, np.ndarray
# Others say whether these change; and a file is an iterator, too.
_KNOWN = torch.nn.Module, torch.optim.Optimizer, LRScheduler, GradScaler, Dataset, IOBase
Contents = dict[str, object]


class ScriptState:
    """What the script around a step keeps. `is_saved` says whether a checkpoint has an object."""

    def __init__(self, is_saved: Callable[[object], bool]) -> None:
        self._is_saved = is_saved
        self._read: dict[str, tuple[str, Any]] = {}  # its place in words, and a value
        self._before: dict[str, Contents] = {}
        self._told: set[str] = set()
        self.arrays: dict[str, str] = {}
        """Digests of the tensors and arrays that the loop reads, as they were when it began, by their places."""

    def begin(self, functions: Mapping[str, object]) -> None:
        """Note what the loop around this call reads, before its first turn, in which a flag may change for good."""
        loops = _around(sys._getframe(1))
        self._note(functions, loops)
        seen = set[int]()
        for loop, values in loops:
            for name in sorted(loop.constant & values.keys()):
                for where, one in self._leaves(_place(name, values[name]), values[name], seen):
                    if (content := content_of(one) if isinstance(one, _ARRAYS) else None) is not None:
                        self.arrays[where] = hashlib.sha256(repr(content).encode()).hexdigest()

    def look(self, functions: Mapping[str, object], generators: Sequence[FrameType]) -> list[str]:
        """Return the variables and the iterators that the loop around this call carries; note what else it reads.

        Call it in a step. Without the source of the running code it finds nothing. It also looks at these `functions`,
        and at the frames of generators that the batches come through.
        """
        inside = [found for frame in generators for found in _around(frame)]
        return self._note(functions, [*_around(sys._getframe(1)), *inside])

    def _note(
        self, functions: Mapping[str, object], loops: Iterable[tuple[RepeatedCode, Mapping[str, Any]]]
    ) -> list[str]:
        """Note what these loops read. Returns what they carry."""
        carried = dict[str, None]()
        seen = set[int]()
        self._read |= {name: (name, one) for name, one in functions.items()}
        for loop, values in loops:
            names = sorted(loop.read & values.keys())
            read = {name: values[name] for name in names if not isinstance(values[name], PLAIN)}
            variables = sorted(loop.carried & values.keys())
            carried |= dict.fromkeys(name for name in variables if not self._is_ours(values[name]))
            for name, one in read.items():
                place = _place(name, one)
                leaves = self._leaves(place, one, seen)
                carried |= dict.fromkeys(where for where, leaf in leaves if isinstance(leaf, Iterator))
                one = type(one) if self._is_known(one) else one
                key = f"self of {place}" if name == "self" else name
                if key not in self._read or self._read[key][1] is not one:  # else it may have changed since then
                    self._read[key] = place, one
                    self._before.pop(key, None)
        self._before = self._now() | self._before
        return [*carried]

    def leave(self) -> None:
        """Forget what the loop reads: it has ended, and its objects may refer to this training."""
        self._read.clear()

    def changed(self) -> list[str]:
        """Return, each once, the places in what it reads that have changed since."""
        found = {
            place
            for name, contents in self._now().items()
            for place, content in contents.items()
            if name in self._before and content != self._before[name].get(place)
        }
        found -= self._told
        self._told |= found
        return sorted(found)

    def _now(self) -> dict[str, Contents]:
        """What each name has."""
        found: dict[str, Contents] = {}
        seen = set[int]()
        for name, (place, value) in self._read.items():
            with contextlib.suppress(Exception):  # another thread changes it; or its own class raises anything
                found[name] = self._inside(place, value, _DEPTH, seen)
        return found

    def _inside(self, place: str, value: Any, depth: int, seen: set[int]) -> Contents:
        """The contents of a value, or of an object's attributes, by their places."""
        if isinstance(value, PLAIN):
            return {place: repr(value)}  # NaN is equal to NaN
        if id(value) in seen or not depth or len(seen) > _MOST_OBJECTS:
            return {}
        seen.add(id(value))
        if isinstance(value, MethodType | BuiltinMethodType):
            return self._inside(place, value.__self__, depth, seen)
        kind = value if isinstance(value, type) else type(value)
        is_of_script = _is_of_script(kind)
        of_class = vars(kind) if is_of_script else {}
        found: Contents = {
            f"{kind.__name__}.{name}": repr(one)
            for name, one in of_class.items()
            if isinstance(one, PLAIN) and not name.startswith("__")
        }
        if value is kind or self._is_known(value):
            return found
        if (content := content_of(value, _version)) is not None:
            found[place] = content
        if isinstance(value, FunctionType):
            inner = _inside_function(value) if is_users(value.__code__.co_filename) else {}
        elif isinstance(value, functools.partial):
            inner = {".func": value.func, **dict(_items([*value.args])), **dict(_items(value.keywords))}
        elif isinstance(value, ModuleType):
            inner = _inside_module(value) if is_users(getattr(value, "__file__", None) or "<") else {}
        elif content is not None:
            inner = {key: one for key, one in _items(value) if content_of(one, _version) is None}
        else:
            inner = _attributes(value) if is_of_script or hasattr(kind, "load_state_dict") else {}
        for key, one in inner.items():
            found |= self._inside(place + key, one, depth - 1, seen)
        return found

    def _leaves(self, place: str, value: Any, seen: set[int], depth: int = _DEPTH) -> list[tuple[str, object]]:
        """The tensors, arrays and iterators in a value, by their places; of another module, its first tensors."""
        if id(value) in seen or not depth or len(seen) > _MOST_OBJECTS or self._is_ours(value):
            return []
        seen.add(id(value))
        if isinstance(value, _ARRAYS) or (isinstance(value, Iterator) and not self._is_known(value)):
            return [(place, value)]
        found: list[tuple[str, object]] = []
        with contextlib.suppress(Exception):  # as above
            inside: Iterable[tuple[str, object]] = _attributes(value).items() if has_own_state(value) else ()
            if isinstance(value, torch.nn.Module):
                inside = [(f".{name}", one) for name, one in itertools.islice(value.state_dict().items(), _LOOKED_AT)]
            elif isinstance(value, dict | list | tuple):
                inside = itertools.islice(_items(value), _MOST_ITEMS)
            for key, one in inside:
                found += self._leaves(place + key, one, seen, depth - 1)
        return found

    def _is_known(self, value: object) -> bool:
        return isinstance(value, _KNOWN) or self._is_ours(value)

    def _is_ours(self, value: object) -> bool:
        """Whether it is of this package, or in the checkpoint. A plain value may be the same object as another one."""
        is_ours = type(value).__module__.startswith("cluster_ddp.")
        return not isinstance(value, PLAIN) and (is_ours or self._is_saved(value))


def _around(frame: FrameType | None) -> list[tuple[RepeatedCode, Mapping[str, Any]]]:
    """The loops of the script around this frame, the functions in them, and those they call, with their variables."""
    repeated: list[tuple[RepeatedCode, FrameType]] = []
    whole = 0
    while frame is not None:
        loop = loop_variables.around(frame) if is_users(frame.f_code.co_filename) else None
        if loop is not None:
            repeated.append((loop, frame))
            whole = len(repeated) if loop.is_loop else whole
        frame = frame.f_back
    found: list[tuple[RepeatedCode, Mapping[str, Any]]] = []
    for number, (loop, one) in enumerate(repeated[:whole], start=1):
        values = {**one.f_globals, **one.f_locals}
        for name in _parameters(one.f_code) if number < whole else ():  # its caller has these, by names of its own
            if name != "self":
                values.pop(name, None)
        found.append((loop, values))
    looked_at = set[FunctionType]()
    for code, variables in found:  # it grows by the functions that they call, and those that these call
        called = {value for name in code.read if isinstance(value := variables.get(name), FunctionType)} - looked_at
        for function in [value for value in called if is_users(value.__code__.co_filename)]:
            looked_at.add(function)
            if len(looked_at) < _MOST_FUNCTIONS and (of_it := loop_variables.of_function(function)) is not None:
                found.append((of_it, function.__globals__))
    return found


def classes_of_script() -> dict[str, type]:
    """Return the classes of the script and its modules, by words: what one has as an attribute, a step may change."""
    names = [vars(one) for one in [*sys.modules.values()] if isinstance(one, ModuleType)]  # no attribute that imports
    values = [
        value for of_module in names if is_users(of_module.get("__file__") or "<") for value in [*of_module.values()]
    ]
    return {f"class {one.__name__}": one for one in values if isinstance(one, type) and _is_of_script(one)}


def has_own_state(value: object) -> bool:
    """Whether an object, such as an attribute of a module, is of a class of the script that nobody else looks at."""
    return _is_of_script(type(value)) and not isinstance(value, (torch.Tensor, *_KNOWN))


def _is_of_script(kind: type) -> bool:
    return is_users(getattr(sys.modules.get(kind.__module__), "__file__", None) or "<")


def _place(name: str, value: object) -> str:
    """A name in words: every class calls its object self."""
    return type(value).__name__ if name == "self" else name


def _items(value: object) -> Iterable[tuple[str, object]]:
    """What a container has, by the words behind its name."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return [(f"[{key!r}]", one) for key, one in pairs]


def _attributes(value: object) -> dict[str, object]:
    """The attributes of an object, also in slots."""
    slots = [name for kind in type(value).__mro__ for name in (*getattr(kind, "__slots__", ()),)]
    of_slots = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {f".{name}": one for name, one in {**of_slots, **getattr(value, "__dict__", {})}.items()}


def _inside_function(function: FunctionType) -> dict[str, object]:
    """What a function keeps: its attributes, the variables around it, and defaults that it may change."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    found: dict[str, object] = {}
    for name, cell in cells.items():
        with contextlib.suppress(ValueError):  # it is empty
            found[f".{name}"] = cell.cell_contents
    names = _parameters(function.__code__)
    defaults = dict(zip(reversed(names[: function.__code__.co_argcount]), reversed(function.__defaults__ or ())))
    found |= {f"({name})": one for name, one in {**defaults, **(function.__kwdefaults__ or {})}.items()}
    return found | {f".{name}": one for name, one in vars(function).items()}


def _inside_module(module: ModuleType) -> dict[str, object]:
    """The variables of a module of the script."""
    own = {name: one for name, one in vars(module).items() if not name.startswith("__")}
    return {f".{name}": one for name, one in own.items() if not isinstance(one, ModuleType | FunctionType | type)}


def _parameters(code: CodeType) -> Sequence[str]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _version(tensor: torch.Tensor) -> object:
    """Which tensor it is, and how often it was changed in place; None of one with a gradient."""
    has_none = tensor.requires_grad or tensor.is_inference()
    return None if has_none else (id(tensor), tensor._version)
