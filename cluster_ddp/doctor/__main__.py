"""`cluster-ddp doctor`: say in seconds why a job would hang.

cluster-ddp doctor                                    on a login node: Slurm, settings, Python, folders
cluster-ddp doctor --nodes 2 --gpus-per-node 2        submit the doctor with the options of a job, and follow it
srun cluster-ddp doctor                               in the tasks of an allocation
cluster-ddp doctor --autopsy RUN                      where the ranks of a run hung

In a job it checks each node alone, then the nodes in pairs, then collectives and a step of DDP. It stops at the first
broken tier, and prints what is wrong, the evidence, and a hint. All other options are those of `cluster-ddp submit`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster_ddp.argument_parser import Parser
from cluster_ddp.doctor.step import examine as step
from cluster_ddp.doctor.step.rank import Options
from cluster_ddp.errors import SpecError, exit_on_error
from cluster_ddp.protocol import Env

PROGRAM = "cluster-ddp doctor"


def parser() -> Parser:
    """The command line, without submit's options."""
    top = Parser(PROGRAM, description=__doc__)
    autopsy = "say where the ranks of a run hung, from its run directory"
    top.add_argument("--autopsy", type=Path, metavar="RUN", help=autopsy)
    top.add_argument("--quick", action="store_true", help="leave out what needs torch: collectives and a step of DDP")
    top.add_argument("--strict", action="store_true", help="exit with status 1 if there are warnings")
    top.add_argument("--json", action="store_true", help="print one line of JSON")
    file = "write the nodes at fault to a file, for sbatch --exclude=./FILE"
    top.add_argument("--exclude-file", type=Path, metavar="FILE", help=file)
    wait = "seconds to wait for ranks that have not started (default: %(default)g)"
    top.add_argument("--wait-s", type=float, default=20.0, metavar="S", help=wait)
    limit = "seconds that a group of checks may take (default: %(default)g)"
    top.add_argument("--check-limit-s", type=float, default=20.0, metavar="S", help=limit)
    top.add_argument("--data-dir", type=Path, metavar="PATH", help="folder of the data, to be looked for on each node")
    top.add_argument("--run-dir", type=Path, metavar="PATH", help="folder of the results, to be written on each node")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options, examine, print the verdict. Returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    command = words[at + 1 :]
    with exit_on_error(PROGRAM):
        arguments, rest = parser().parse_known_args(words[:at])
        if arguments.autopsy is not None:
            return _autopsy(arguments.autopsy, [*rest, *command], as_json=arguments.json)
        if rest:
            from cluster_ddp.doctor import submitted

            return submitted.examine(rest, _own_words(words[:at], rest), parser())
        options = _options(arguments)
        if _is_in_job():
            status = step.examine(options, os.environ)
            return _run(command) if command and not status else status
        if command:
            raise SpecError(f"Running {shlex.join(command)}:", "this is not a job.", "srun cluster-ddp doctor -- …")
        from cluster_ddp.doctor import login

        return login.examine(options, os.environ)


def _autopsy(run: Path, others: Sequence[str], *, as_json: bool) -> int:
    from cluster_ddp.doctor.hang_autopsy import autopsy

    if others:
        raise SpecError(
            f"An autopsy with {shlex.join(others)}:", "it takes no other words.", f"{PROGRAM} --autopsy RUN [--json]"
        )
    print(autopsy(run, as_json=as_json))
    return 0


def _options(arguments: argparse.Namespace) -> Options:
    for name, value in (("--wait-s", arguments.wait_s), ("--check-limit-s", arguments.check_limit_s)):
        if not 0 < value < 1e6:
            raise SpecError(f"Examining with {name} {value:g}:", "it is a number of seconds above 0.", f"{name} 20")
    run_dir = arguments.run_dir or os.environ.get(Env.RUN_DIR)
    return Options(
        quick=arguments.quick,
        strict=arguments.strict,
        as_json=arguments.json,
        exclude_file=arguments.exclude_file,
        wait_s=arguments.wait_s,
        check_limit_s=arguments.check_limit_s,
        data_dir=arguments.data_dir,
        run_dir=Path(run_dir) if run_dir else None,
    )


def _is_in_job() -> bool:
    return any(os.environ.get(name) for name in ("SLURM_JOB_ID", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"))


def _own_words(words: Sequence[str], rest: Sequence[str]) -> list[str]:
    """The words that are the doctor's own, for the job."""
    left = list(rest)
    own = []
    for word in words:
        if left and word == left[0]:
            left.pop(0)
        else:
            own.append(word)
    return own


def _run(command: Sequence[str]) -> int:
    """Become the command. All is well, so the job begins."""
    sys.stdout.flush()
    os.execvp(command[0], list(command))


if __name__ == "__main__":
    sys.exit(main())
