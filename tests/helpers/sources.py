"""The source of this project as syntax trees: each file is read once for all tests of rules."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

TOGETHER = pytest.mark.xdist_group("sources")
"""Tests that read all files: in one process of pytest-xdist, as each would read them again."""


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """All of a file, in the order of `ast.walk`."""
    return list(ast.walk(tree(path)))
