"""Jobs on this machine, without a queue; the agent starts the ranks."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from cluster_ddp import processes
from cluster_ddp.agent import outcome
from cluster_ddp.agent.job import shell_env
from cluster_ddp.errors import JobError, RunDirError, SpecError
from cluster_ddp.protocol import File
from cluster_ddp.run_files import why
from cluster_ddp.slurm.job_status import JobStatus
from cluster_ddp.submission.backends import Held, identity

# Reads the run directory's path from stdin, then becomes the job's script, with the same process id.
_WAITING = (
    "IFS= read -r folder"
    f' && exec bash "$folder/{File.LOCAL_SCRIPT}" "$folder" >>"$folder/{File.JOB_LOG}" 2>&1 </dev/null'
)


# How Slurm names states that its own jobs don't have.
_STATES = {"STOPPED": "FAILED"}


class ThisMachine:
    """This machine. A job's id is its process id. It keeps running when the submitting process ends."""

    script_name = File.LOCAL_SCRIPT

    def test_only(self, script: str, options: Sequence[str]) -> NoReturn:
        """Raise SpecError."""
        raise SpecError("Asking the scheduler with --test-only:", "this machine has none.", "leave --test-only out")

    def hold(self, script: str, options: Sequence[str]) -> Held:
        """Start a process that waits for its run directory."""
        process = subprocess.Popen(
            ["bash", "-c", _WAITING],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=shell_env.inherited(os.environ),
            start_new_session=True,
        )
        known = {"host": socket.gethostname(), "process": processes.started(process.pid)}
        return Held(label=str(process.pid), process=process, identity=known)

    def release(self, held: Held, folder: Path, begin: str) -> None:
        """Tell the process its run directory. The job runs at once, whatever `begin` is."""
        held.process.stdin.write(os.fsencode(folder) + b"\n")
        held.process.stdin.close()

    def abandon(self, held: Held) -> None:
        """End the waiting process."""
        held.process.kill()
        held.process.wait()

    def cancel(self, label: str, cluster: str | None, folder: Path) -> None:
        """Send TERM to the job, which ends its tasks. Nothing happens if it has ended.

        Raises:
            JobError: it is another user's.
            RunDirError: it runs, or ran, on another machine.
        """
        try:
            if _is_running(label, folder):
                os.kill(int(label), signal.SIGTERM)
        except ProcessLookupError:
            return
        except PermissionError as error:
            user = Path("/proc", label).stat().st_uid
            found = f"its process belongs to user {user}; you are {os.geteuid()}."
            raise JobError(f"Cancelling job {label} on this machine:", found, "ask that user") from error

    def statuses(self, label: str, cluster: str | None, folder: Path) -> list[JobStatus]:
        """Return the job's status, from outcome.json in its run directory and from its process.

        Raises:
            RunDirError: outcome.json is damaged; or it is missing, and the job runs, or ran, on another machine.
        """
        running = _is_running(label, folder)  # before its outcome is read: the job writes that, then ends
        path = folder / File.OUTCOME
        try:
            ended = outcome.read(folder)
        except (OSError, ValueError) as error:
            hint = f"remove it, and the job counts as failed: rm {shlex.quote(str(path))}"
            raise RunDirError(f"Reading {path}:", f"it is damaged: {why(error)}.", hint) from error
        if ended is not None and not ended.requeued:
            state, exit_code = _STATES.get(ended.state, ended.state), ended.status
        elif running:
            state, exit_code = "RUNNING", 0
        else:
            state, exit_code = "FAILED", 1  # it ended before its tasks started, or was killed
        return [
            JobStatus(
                job_id=int(label),
                state=state,
                reason="None",
                exit_code=exit_code,
                signal=0,
                stdout=str(folder / File.JOB_LOG),
            )
        ]


def _is_running(label: str, folder: Path) -> bool:
    """Whether the process with that id is the job of this run directory, not a later process with the same id.

    Raises:
        RunDirError: the job runs, or ran, on another machine, and its end was not noted.
    """
    known = identity.of(folder, label)
    if known.process and processes.started(int(label)) == known.process:
        return True
    if known.host and known.host != socket.gethostname() and not (folder / File.OUTCOME).exists():
        found = f"it was started on {known.host}, and this is {socket.gethostname()}."
        record = {"version": outcome.VERSION, "job": label, "restart": 0, "state": "FAILED", "status": 1}
        noted = f"echo {shlex.quote(json.dumps(record))} >{shlex.quote(str(folder / File.OUTCOME))}"
        hint = f"ask there; if it has ended, note that: {noted}"
        raise RunDirError(f"Looking for job {label} of {folder}:", found, hint)
    return False
