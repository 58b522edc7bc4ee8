"""Namespaces of the kernel for tests on one machine. Some containers forbid them, and so does a chroot."""

from __future__ import annotations

import subprocess

import pytest


def unshare(*options: str) -> list[str]:
    """The words before a command that runs in namespaces of its own; the test is skipped if there can be none."""
    words = ["unshare", *options]
    done = subprocess.run([*words, "true"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no {' '.join(words)} here: {done.stderr.strip()}")
    return words
