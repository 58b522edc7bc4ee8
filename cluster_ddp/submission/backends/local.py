"""Jobs on this machine, without a queue; the agent starts the ranks."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from cluster_ddp import processes
from cluster_ddp.agent.job import inherited_env
from cluster_ddp.errors import JobError, RunDirError, SpecError
from cluster_ddp.run import journal
from cluster_ddp.run.job_file import JobFile
from cluster_ddp.run.journal import Event
from cluster_ddp.run.names import File
from cluster_ddp.slurm.job_status import JobStatus
from cluster_ddp.submission.backends import job_identity

_PATIENCE_S = 20.0  # the agent gives the ranks ten seconds

# How Slurm names states that its own jobs don't have.
_STATES = {"STOPPED": "FAILED"}


class ThisMachine:
    """This machine. A job's id is its process id. It keeps running when the submitting process ends."""

    script_name = File.LOCAL_SCRIPT

    def test_only(self, script: str, options: Sequence[str]) -> NoReturn:
        """Raise SpecError."""
        raise SpecError("Asking the scheduler with --test-only:", "this machine has none.", "leave --test-only out")

    def new_comment(self, script: str) -> str:
        """Return an empty text: no job here has a comment."""
        return ""

    def submit(self, folder: Path, options: Sequence[str], comment: str) -> JobFile:
        """Start the script in a run directory."""
        with (folder / File.JOB_LOG).open("ab") as log:
            process = subprocess.Popen(
                ["bash", str(folder / File.LOCAL_SCRIPT), str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=inherited_env.inherited(os.environ),
                start_new_session=True,
            )
        host, started = socket.gethostname(), processes.started(process.pid)
        return JobFile(str(process.pid), time=time.time(), host=host, process=started)

    def abandon(self, job: JobFile, folder: Path) -> None:
        """End the job, and wait for its end."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(job.job), number)
            deadline = time.monotonic() + _PATIENCE_S
            while processes.started(int(job.job)) and time.monotonic() < deadline:
                time.sleep(0.05)

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
        """Return the job's status, from the journal in its run directory and from its process.

        Raises:
            RunDirError: the journal does not tell, and the job runs, or ran, on another machine.
        """
        running = _is_running(label, folder)  # before its end is read: the job writes that, then ends
        ended = journal.last_end(folder, label)
        if ended is not None and not ended.starts_again:
            state, exit_code = _STATES.get(ended.state, ended.state), ended.status
        elif running:
            state, exit_code = "RUNNING", 0
        else:
            state, exit_code = "FAILED", 1  # it ended before its tasks started, or was killed
        log = str(folder / File.JOB_LOG)
        return [JobStatus(job_id=int(label), state=state, exit_code=exit_code, signal=0, stdout=log)]


def _is_running(label: str, folder: Path) -> bool:
    """Whether the process with that id is the job of this run directory, not a later process with the same id.

    Raises:
        RunDirError: the job runs, or ran, on another machine, and its end was not noted.
    """
    known = job_identity.of(folder, label)
    if known.process and processes.started(int(label)) == known.process:
        return True
    if known.host and known.host != socket.gethostname() and journal.last_end(folder, label) is None:
        found = f"it was started on {known.host}, and this is {socket.gethostname()}."
        end = {"time": round(time.time()), "job": label, "start": 0, "state": "FAILED", "status": 1}
        line = json.dumps({"event": Event.END, **end})
        noted = f"echo {shlex.quote(line)} >>{shlex.quote(str(folder / File.JOURNAL))}"
        hint = f"ask there; if it has ended, note that: {noted}"
        raise RunDirError(f"Looking for job {label} of {folder}:", found, hint)
    return False
