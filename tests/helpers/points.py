"""Something happens at the n-th moment before, amid or after a change on disk: a kill, a full disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from io import FileIO
from typing import Any

import pytest

from cluster_ddp.run import files


class Points:
    """The moments before, amid and after each change that files.py makes on disk; at the n-th, something happens."""

    def __init__(self, happen: Callable[[str], None], at: int) -> None:
        self.happen, self.left = happen, at

    def pass_by(self, name: str) -> None:
        self.left -= 1
        if self.left == 0:
            self.happen(name)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("fsync", "replace", "rename", "unlink", "mkdir"):
            patch.setattr(os, name, self._around(name, getattr(os, name)))
        points = self

        class File(FileIO):
            """Without a buffer, so that what was written when it happens is on disk."""

            def write(self, data: Any) -> int:
                data = bytes(data)
                points.pass_by("write")
                half = super().write(data[: len(data) // 2])
                points.pass_by("half a write")
                half += super().write(data[half:])
                points.pass_by("written")
                return half

        patch.setattr(files, "open", lambda path, mode: File(path, mode.replace("b", "")), raising=False)

    def _around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.pass_by(name)
            result = function(*args, **options)
            self.pass_by(f"{name} done")
            return result

        return call
