"""Modules that a job's own Python runs, found without the working folder.

With `python -m`, modules in the working folder come before Python's own: a json.py there would end the job, and a
restart could run other code than the first start.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster_ddp.agent import command_program

_FIND = "import sys; here = sys.path[:1] == ['']; del sys.path[: int(here)]; from {} import main; "
_RUN = "sys.exit(main())"
_RUN_PROGRAM = "sys.path[:0] = [''] * here; main()"


def words(module: str, *, runs_program: bool = False) -> list[str]:
    """Return Python's option that runs a module's `main`; its arguments follow.

    Args:
        module: full name, such as "cluster_ddp.doctor.__main__".
        runs_program: whether a program of the user's runs in the same process, which has the working folder.
    """
    return ["-c", _FIND.format(module) + (_RUN_PROGRAM if runs_program else _RUN)]


def doctor(command: Sequence[str]) -> list[str]:
    """Return the command that examines a node by the Python of a command, in seconds."""
    return [command_program.interpreter(command), *words("cluster_ddp.doctor.__main__"), "--quick"]
