"""A command that ends once the notice of its slowness was printed: no test has to be quick."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from cluster_ddp import waiting_notice


def until_named(monkeypatch: pytest.MonkeyPatch, folder: Path, *, on_terminal: bool) -> str:
    """Return lines of sh that wait for the notice; without a terminal, for the moment at which there is none."""
    seen = folder / "the notice's time has come"
    seen.unlink(missing_ok=True)

    def is_terminal() -> bool:
        if not on_terminal:
            seen.touch()
        return on_terminal

    def say(*words: object, **options: object) -> None:
        print(*words, **options)  # type: ignore[call-overload]
        seen.touch()

    monkeypatch.setattr(waiting_notice, "_SILENT_S", 0.05)
    monkeypatch.setattr(waiting_notice.sys.stderr, "isatty", is_terminal)
    monkeypatch.setattr(waiting_notice, "print", say, raising=False)
    return f"until [ -e {shlex.quote(str(seen))} ]; do /bin/sleep 0.02; done"
