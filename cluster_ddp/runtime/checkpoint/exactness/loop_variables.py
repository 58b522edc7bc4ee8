"""Which variables a script's loop carries from one turn to the next, by its source.

A loop carries a variable that it assigns, and may read before it assigns it: one that is live where the turn begins
(live variables: Aho, Lam, Sethi, Ullman, "Compilers", section 9.2.5). A resume begins without that value.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeAlias

_CLOCKS = "time", "time_ns", "perf_counter", "monotonic", "now"
_LEAVES = ast.Continue, ast.Break, ast.Return, ast.Raise
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_ScopeNode: TypeAlias = ast.Module | _FunctionNode
_LoopNode: TypeAlias = ast.For | ast.While
_SHARED = ast.Global | ast.Nonlocal


@dataclass(frozen=True)
class RepeatedCode:
    """The loops of a function around a line; or a function that a loop calls."""

    carried: frozenset[str]
    """Variables that one turn, or call, leaves to the next."""
    read: frozenset[str]
    """Names that one of the loops, or the function, reads and does not assign: what they name may change."""
    constant: frozenset[str]
    """Those of them that no loop assigns."""
    is_loop: bool


def around(frame: FrameType) -> RepeatedCode | None:
    """Return the loop of a frame around its line, else its function; None without the source of what runs."""
    scope, loops = _at(frame.f_code, frame.f_lineno, frame.f_globals)
    if not loops:
        return _of_call(scope) if isinstance(scope, _FunctionNode) else None
    carried, read = set[str](), set[str]()
    outside: list[ast.AST] = [*scope.body]
    for loop in loops:
        turn = _Turn(_of_turn(loop))
        carried |= turn.carried | (turn.left & _Turn(outside, without=loop, left=turn.left).early)
        read |= turn.read - turn.assigned_anywhere
        outside = _of_turn(loop)
    constant = read - _Turn(_of_turn(loops[0])).assigned_anywhere
    return RepeatedCode(frozenset(carried), frozenset(read), frozenset(constant), is_loop=True)


def of_function(function: FunctionType) -> RepeatedCode | None:
    """Return what a function that a loop calls carries and reads of its module; None without its source."""
    code = function.__code__
    last = max((line for _, _, line in code.co_lines() if line), default=0)
    node, _ = _at(code, last, function.__globals__)
    return _of_call(node) if isinstance(node, _FunctionNode) else None


def _of_turn(loop: _LoopNode) -> list[ast.AST]:
    return [loop.target if isinstance(loop, ast.For) else loop.test, *loop.body]


def _of_call(function: _FunctionNode) -> RepeatedCode:
    turn = _Turn(function.body)
    shared = {name for node in ast.walk(function) if isinstance(node, _SHARED) for name in node.names}
    read = frozenset(turn.read - turn.assigned_anywhere)
    return RepeatedCode(frozenset(turn.carried & shared), read, read, is_loop=False)


def _at(code: CodeType, line: int, variables: dict[str, Any]) -> tuple[_ScopeNode, list[_LoopNode]]:
    """The function or file around a line of this code, and the loops in it. Without its source it is empty."""
    scope: _ScopeNode = ast.Module([], [])
    loops: list[_LoopNode] = []
    tree, codes = _parsed("".join(linecache.getlines(code.co_filename, variables)))
    if code not in codes:
        return scope, loops
    scope = tree
    for node in _around(tree, line):
        if isinstance(node, _FunctionNode):
            scope, loops = node, []
        elif isinstance(node, _LoopNode):
            loops.append(node)
    return scope, loops


@functools.lru_cache(maxsize=4)
def _parsed(text: str) -> tuple[ast.Module, frozenset[CodeType]]:
    """A source, and the code of it and of all functions in it; nothing if it can't be read."""
    try:
        tree = ast.parse(text)
        return tree, frozenset(_codes(compile(tree, "", "exec", dont_inherit=True)))
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], []), frozenset()


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a file, and that of all functions in it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes(one)


def _around(tree: ast.AST, line: int) -> Iterator[ast.AST]:
    """The nodes around a line, from the outermost one."""
    for node in ast.iter_child_nodes(tree):
        if getattr(node, "lineno", line) <= line <= getattr(node, "end_lineno", line):
            yield node
            yield from _around(node, line)


class _Turn(ast.NodeVisitor):
    """Goes through one turn of a loop in the order in which Python runs it. A loop in it runs at least once.

    But one, `without`, which is left out: it may assign the variables that are `left`.
    """

    def __init__(self, body: Iterable[ast.AST], *, without: ast.AST | None = None, left: Iterable[str] = ()) -> None:
        self._without, self._left = without, left
        self.read: set[str] = set()
        self.assigned_anywhere: set[str] = set()
        self._kept: set[str] = set()  # of these, those that do not only have a time of a clock
        self.early: set[str] = set()
        """Variables that are read where they may not be assigned yet."""
        self._assigned: set[str] = set()  # on every way to here
        for node in body:
            self.visit(node)

    @property
    def carried(self) -> set[str]:
        """Variables that it may read before it has assigned them, and assigns."""
        return self.early & self._kept

    @property
    def left(self) -> set[str]:
        """Variables that it may assign, or not."""
        return self._kept - self._assigned

    def visit(self, node: ast.AST) -> None:
        if node is self._without:
            self._assigned.difference_update(self._left)
        else:
            super().visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._read(node.id)
        else:
            self._assign(node.id)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        if _is_time(node.value):
            names = {one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)}
            self._assigned |= names
            self.assigned_anywhere |= names
        else:
            self._visit_all(node.targets)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._visit_all([node.value, node.target])

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._visit_all([node.value, node.target])

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self._read(node.target.id)
        self._visit_all([node.value, node.target])

    def visit_For(self, node: ast.For) -> None:
        self._visit_all([node.iter, node.target, *node.body, *node.orelse])

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self._branch(node.body, node.orelse)

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        self._branch([], *([one.pattern, *([one.guard] if one.guard else []), *one.body] for one in node.cases))

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        self.generic_visit(node)
        if node.name:
            self._assign(node.name)

    def visit_Try(self, node: ast.Try) -> None:
        self._branch([*node.body, *node.orelse], *(one.body for one in node.handlers))
        self._visit_all(node.finalbody)

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for one in node.names:
                self._assign((one.asname or one.name).partition(".")[0])
        elif isinstance(node, _COMPREHENSIONS | _FunctionNode | ast.Lambda):
            self._visit_inner(node)
        elif not isinstance(node, ast.ClassDef):
            super().generic_visit(node)
        if isinstance(node, _FunctionNode | ast.ClassDef):
            self._assign(node.name)

    def _visit_inner(self, scope: ast.AST) -> None:
        """A comprehension or a function: what it reads of here, and what it assigns here by nonlocal or global."""
        nodes = [*ast.walk(scope)]
        names = [one for one in nodes if isinstance(one, ast.Name)]
        shared = {name for one in nodes if isinstance(one, _SHARED) for name in one.names}
        own = {one.id for one in names if not isinstance(one.ctx, ast.Load)} - shared
        own |= {one.arg for one in nodes if isinstance(one, ast.arg)}
        for one in names:
            if one.id not in own:
                self._read(one.id)
        self._kept |= shared
        self.assigned_anywhere |= shared

    def _branch(self, *bodies: Iterable[ast.AST]) -> None:
        """Go through each body from here. Only what all that come to their end assign is assigned afterwards."""
        before, ends = self._assigned, list[set[str]]()
        for body in bodies:
            self._assigned = {*before}
            nodes = self._visit_all(body)
            if not (nodes and isinstance(nodes[-1], _LEAVES)):
                ends.append(self._assigned)
        self._assigned = set.intersection(*ends) if ends else before

    def _visit_all(self, nodes: Iterable[ast.AST]) -> list[ast.AST]:
        visited = list(nodes)
        for node in visited:
            self.visit(node)
        return visited

    def _read(self, name: str) -> None:
        self.read.add(name)
        if name not in self._assigned:
            self.early.add(name)

    def _assign(self, name: str) -> None:
        self._assigned.add(name)
        self._kept.add(name)
        self.assigned_anywhere.add(name)


def _is_time(value: ast.expr) -> bool:
    """Whether a value is the time of a clock, which no resume needs."""
    function = value.func if isinstance(value, ast.Call) else None
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in _CLOCKS
