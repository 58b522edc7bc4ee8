"""What `cluster-ddp VERB` runs; each module has the verb's `parser` and `main`.

init        the first settings and job script of a project
env         the place of this process in its job
launch      starts ranks in a job that exists already, or on this machine
status      the state and progress of jobs and trainings
logs        what a job has printed
cancel      ends jobs
report      what became of a run, and how it used its CPUs, memory and GPUs
memory      whether a model fits in a GPU, from its shapes
export      a checkpoint's weights as a plain file for other tools
fetch       copies run directories from a cluster that is reached by ssh
completion  what lets bash or zsh complete command lines

submit and train are at the top of the package, since they are also called as modules; doctor, scaling and sandbox are
packages.
"""

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
