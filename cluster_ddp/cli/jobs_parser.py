"""The parser of the verbs that read run directories."""

from __future__ import annotations

from pathlib import Path

from cluster_ddp.argument_parser import Parser, add_on


def jobs_parser(program: str, description: str | None) -> Parser:
    """Return the parser of a verb that reads run directories, with --runs-dir and --on."""
    made = Parser(program, description=description)
    folder = "folder of the run directories (default: runs)"
    made.add_argument("--runs-dir", type=Path, default=Path("runs"), metavar="PATH", help=folder)
    add_on(made)
    return made
