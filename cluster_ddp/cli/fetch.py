"""`cluster-ddp fetch --on HOST JOB …`: copy the run directories of jobs from a cluster that is reached by ssh.

JOB is a job id (12, or 12_3 for an array task; an array's id means all its tasks) or a run directory there. What was
copied before is brought up to date.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from cluster_ddp.argument_parser import Parser, jobs_parser
from cluster_ddp.errors import RemoteError, RunDirError, SpecError, exit_on_error, printable
from cluster_ddp.remote import project
from cluster_ddp.remote.project import Project
from cluster_ddp.run import places
from cluster_ddp.run.files import read_json
from cluster_ddp.run.names import File

PROGRAM = "cluster-ddp fetch"


def parser() -> Parser:
    """The command line."""
    top = jobs_parser(PROGRAM, __doc__)
    top.add_argument("jobs", nargs="+", metavar="JOB", help="job ids or run directories")
    to = "folder here for the run directories (default: runs)"
    top.add_argument("--to", type=Path, default=Path("runs"), metavar="PATH", help=to)
    top.add_argument("--checkpoints", action="store_true", help="copy the checkpoints, too")
    return top


def main(argv: Sequence[str]) -> int:
    """Parse the options, find the run directories there, copy them. Returns the exit status."""
    with exit_on_error(PROGRAM):
        arguments = parser().parse_args(argv)
        if arguments.on is None:
            hint = f"{PROGRAM} --on HOST {shlex.join(arguments.jobs)}"
            raise SpecError("Fetching run directories:", "--on must say from which machine.", hint)
        with project.connected(arguments.on) as there:
            there.require()
            for run_dir in _run_dirs(there, arguments):
                print(printable(f"Fetched {_fetch(there, run_dir, arguments)}"))
    return 0


def _run_dirs(there: Project, arguments: argparse.Namespace) -> list[PurePosixPath]:
    """The run directories there, absolute."""
    program, _ = there.program(needs_slurm=False)
    status = (program, "status", "--json", "--runs-dir", str(arguments.runs_dir), *arguments.jobs)
    found = json.loads(there.answer(*status))
    folders = [one["run_dir"] for one in found if one["run_dir"]]
    if not folders:
        asked, said = f"Fetching {shlex.join(arguments.jobs)}:", f"no run directory on {there.host.name}."
        raise RemoteError(asked, said, f"see what is there: cluster-ddp status --on {there.place}")
    real = there.answer("readlink", "-ze", "--", *folders)  # a name may have a line break
    return [PurePosixPath(path) for path in real.split("\0") if path]


def _fetch(there: Project, run_dir: PurePosixPath, arguments: argparse.Namespace) -> Path:
    """Copy one run directory. Returns where it is here."""
    to: Path = arguments.to
    target, origin = to / places.title(run_dir), f"{there.host.name}:{run_dir}"
    record = target / project.RECORD
    if target.exists() and not _is_copy(record, origin):
        hint = f"choose another folder: --to {shlex.quote(f'{to}-{there.host.name}')}"
        raise RunDirError(f"Copying {origin} to {target}:", "there is another run of that name.", hint)
    target.mkdir(parents=True, exist_ok=True, mode=0o700)
    record.write_text(json.dumps({"origin": origin}))
    left_out = [project.RECORD] if arguments.checkpoints else [project.RECORD, File.CHECKPOINTS]
    # As --archive, but a stranger chooses no owner, no device, and no file that runs as us or that others may write.
    how = ["-rlpt", "--chmod=ug-s,go-w", *(f"--exclude=/{name}" for name in left_out)]
    there.host.rsync(how, str(run_dir), target)
    return target


def _is_copy(record: Path, origin: str) -> bool:
    try:
        return read_json(record) == {"origin": origin}
    except (OSError, ValueError):
        return False
