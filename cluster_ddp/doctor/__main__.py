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
from typing import TYPE_CHECKING, Any

from cluster_ddp.argument_parser import Parser, add_fields
from cluster_ddp.doctor.step.leader_follower import Follower, Leader
from cluster_ddp.doctor.step.rank import DoctorOptions, RankIdentity
from cluster_ddp.doctor.step.report_folder import LEADS
from cluster_ddp.errors import SpecError, exit_on_error
from cluster_ddp.run.names import Env
from cluster_ddp.runtime.rendezvous import host_setup

if TYPE_CHECKING:
    from cluster_ddp.submission.planning import Plan

PROGRAM = "cluster-ddp doctor"
_NOT_FOR_ITS_JOB = ("--array", "--resume", "--on", "--watch", "--test-only")
# With these, the job's own Python is the first on its PATH.
_OTHER_PYTHON = ("--venv", "--conda-env", "--modules", "--setup", "--container", "--container-image")
_TIME_MIN = "10"
_FORMS: dict[str, dict[str, Any]] = {
    **{key: {"action": "store_true"} for key in ("quick", "strict", "json")},
    "exclude_file": {"metavar": "FILE"},
}


def parser(*, with_texts: bool = True) -> Parser:
    """The command line, without submit's options: --autopsy, and an option for each field of `DoctorOptions`.

    Args:
        with_texts: read the fields' docstrings for --help, which takes some milliseconds.
    """
    top = Parser(PROGRAM, description=__doc__)
    autopsy = "say where the ranks of a run hung, from its run directory"
    top.add_argument("--autopsy", type=Path, metavar="RUN", help=autopsy)
    add_fields(top, DoctorOptions, with_texts=with_texts, forms=_FORMS)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options, examine, print the verdict. Returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    own, command = words[:at], words[at + 1 :]
    with exit_on_error(PROGRAM):
        arguments, rest = parser(with_texts="-h" in own or "--help" in own).parse_known_args(own)
        if arguments.autopsy is not None:
            return _autopsy(arguments.autopsy, [*rest, *command], as_json=arguments.json)
        if rest:
            return _submit(rest, own)
        options = _options(arguments)
        if any(os.environ.get(name) for name in ("SLURM_JOB_ID", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")):
            status = _examine_step(options)
            return _become(command) if command and not status else status
        if command:
            raise SpecError(f"Running {shlex.join(command)}:", "this is not a job.", "srun cluster-ddp doctor -- …")
        from cluster_ddp.doctor import login_node_checks

        return login_node_checks.examine(options, os.environ)


def _examine_step(options: DoctorOptions) -> int:
    """Examine this rank, together with all others of its step. Rank 0 prints the verdict. Returns the status of all."""
    host_setup.raise_open_files_limit()
    identity = RankIdentity.of(os.environ)
    folder = identity.report_folder(os.environ)
    # Several processes may take themselves for rank 0: the first that makes a file leads.
    leads = identity.rank == 0 and folder.is_first(LEADS, otherwise=True)
    rank = (Leader if leads else Follower)(options, os.environ, identity, folder)
    try:
        return rank.run()
    finally:
        rank.close()


def _autopsy(run: Path, others: Sequence[str], *, as_json: bool) -> int:
    from cluster_ddp.doctor.hang_autopsy import autopsy

    if others:
        raise SpecError(
            f"An autopsy with {shlex.join(others)}:", "it takes no other words.", f"{PROGRAM} --autopsy RUN [--json]"
        )
    print(autopsy(run, as_json=as_json))
    return 0


def _options(arguments: argparse.Namespace) -> DoctorOptions:
    values = {name: value for name, value in vars(arguments).items() if name != "autopsy" and value is not None}
    if os.environ.get(Env.RUN_DIR):
        values.setdefault("run_dir", Path(os.environ[Env.RUN_DIR]))
    return DoctorOptions(**values)


def _submit(options: Sequence[str], words: Sequence[str]) -> int:
    """Submit the doctor as a job of its own, follow it, and return its exit status.

    `options` are those of the job that it is asked about, among all `words` of the command line.
    """
    from cluster_ddp.jobs.watch import follow
    from cluster_ddp.submission import submit_plan
    from cluster_ddp.submission.cli import submit_command

    names = [word.partition("=")[0] for word in options]
    for name in _NOT_FOR_ITS_JOB:
        if name in names:
            asked = f"Submitting the doctor with {name}:"
            raise SpecError(asked, "it is one job, which is followed.", f"leave out {name}")
    python = "python" if set(names) & set(_OTHER_PYTHON) else sys.executable
    chosen = [
        *([] if "--name" in names else ["--name", "doctor"]),
        *([] if "--time" in names else ["--time", _TIME_MIN]),
        # What it finds is its result.
        *("--restarts", "0", "--spare-nodes", "0", "--hang-restart-s", "0", "--max-mem", "0"),
    ]

    def submit(plan: Plan, watch: bool) -> int:
        return follow(submit_plan.submit(plan), show=lambda line: print(line, flush=True))

    return submit_command.run(
        [*options, *chosen, "--", python, "-m", "cluster_ddp.doctor", *_without(words, options)],
        program=PROGRAM,
        description="The doctor as a job of its own, with the options of the job that it is asked about.",
        submit=submit,
        others=parser(with_texts=False).option_names(),
    )


def _without(words: Sequence[str], removed: Sequence[str]) -> list[str]:
    """Return words without others, which are among them in the same order."""
    left, kept = list(removed), []
    for word in words:
        if left and word == left[0]:
            left.pop(0)
        else:
            kept.append(word)
    return kept


def _become(command: Sequence[str]) -> int:
    """Become the command. All is well, so the job begins."""
    sys.stdout.flush()
    os.execvp(command[0], list(command))


if __name__ == "__main__":
    sys.exit(main())
