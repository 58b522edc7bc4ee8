"""A machine behind ssh(1): the user's own ssh, with their configuration, keys and agent. Nothing is stored of these."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster_ddp.errors import RemoteError
from cluster_ddp.waiting_notice import named_if_slow

_SSH_FAILED = 255  # ssh(1): the status if ssh itself failed
# A line before the output of a command: the shell's start-up files may print as well.
_MARK = "cluster-ddp:begin"


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A machine to which a connection is open. Made by `connect`."""

    name: str
    """As the user's ssh knows it: HOST, USER@HOST, or a name in ~/.ssh/config."""
    options: tuple[str, ...]
    """Options of ssh by which later commands use the same connection."""

    def answer(self, script: str, *words: str, stdin: str = "") -> str:
        """Run a bash script in a login shell there, with these words as its arguments. Returns what it printed.

        Raises:
            RemoteError: ssh failed, or the script did. The error has their words.
        """
        command = ["ssh", *self.options, "--", self.name, _login_shell(f"echo {_MARK}\n{script}", words)]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True)
        if done.returncode != 0:
            raise _failed(self.name, done.returncode, done.stderr)
        return done.stdout.partition(f"{_MARK}\n")[2]

    def run(self, script: str, *words: str) -> int:
        """Run a bash script in a login shell there, on this terminal. Returns its exit status.

        Raises:
            RemoteError: ssh failed.
        """
        terminal = ["-t"] if sys.stdin.isatty() and sys.stdout.isatty() else []  # Ctrl-C then reaches the script
        command = ["ssh", *self.options, *terminal, "--", self.name, _login_shell(script, words)]
        status = subprocess.run(command).returncode
        if status == _SSH_FAILED:
            said = "the connection failed or broke; ssh's message is above. A job may have been submitted"
            raise _failed(self.name, status, said)
        return status

    def rsync(self, options: Sequence[str], source: str | Path, target: str | Path, *, stdin: bytes = b"") -> None:
        """Copy the content of a folder over the same connection, with rsync(1).

        Args:
            options: its options.
            source: the folder; a Path is here, a text there.
            target: where its content goes.
            stdin: its input.

        Raises:
            RemoteError: there is no rsync here, or it failed. The error has its words.
        """
        asked = f"Copying files to or from {self.name}:"
        if shutil.which("rsync") is None:
            hint = "install it: apt install rsync, or ask your support"
            raise RemoteError(asked, "there is no rsync on this machine.", hint)
        # No name may become an option, or the name of a machine: one begins with "-", or has a colon.
        paths = [f"{one.absolute()}/" if isinstance(one, Path) else f"{self.name}:{one}/" for one in (source, target)]
        command = ["rsync", "--protect-args", f"--rsh={shlex.join(['ssh', *self.options])}", *options, "--", *paths]
        with named_if_slow(f"rsync to copy files to or from {self.name}"):
            done = subprocess.run(command, input=stdin, capture_output=True)
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip()
            found = f"rsync ended with status {done.returncode}: {said}."
            raise RemoteError(asked, found, f"look there: ssh {self.name} 'command -v rsync; df -h .; quota -s'")


@contextlib.contextmanager
def connect(name: str) -> Iterator[Host]:
    """Open one connection for all that follows, so that a password or a code is asked for once.

    A connection that the user's own configuration shares (ControlPath) is used instead.

    Raises:
        RemoteError: the name is an option of ssh, or there is no ssh here.
    """
    if name.startswith("-"):
        raise RemoteError(f"Connecting to {name}:", f"{name} is not the name of a machine.", "write --on HOST")
    if shutil.which("ssh") is None:
        raise RemoteError(f"Connecting to {name}:", "there is no ssh on this machine.", "install OpenSSH's client")
    settings = subprocess.run(["ssh", "-G", "--", name], capture_output=True, text=True).stdout.splitlines()
    if any(line.startswith("controlpath ") and line != "controlpath none" for line in settings):
        yield Host(name=name, options=())
        return
    with tempfile.TemporaryDirectory(prefix="cluster-ddp-", dir="/tmp") as folder:  # a socket's path must be short
        sharing = ("-o", f"ControlPath={folder}/ssh", "-o", "ControlMaster=auto", "-o", "ControlPersist=60")
        try:
            yield Host(name=name, options=sharing)
        finally:
            end = ["ssh", "-o", f"ControlPath={folder}/ssh", "-O", "exit", "--", name]
            subprocess.run(end, stdin=subprocess.DEVNULL, capture_output=True)


def _login_shell(script: str, words: Sequence[str]) -> str:
    """One word for the shell of the user there, which may not be bash."""
    return f"exec bash -lc {shlex.join([script, 'bash', *words])}"


def _failed(name: str, status: int, said: str) -> RemoteError:
    found, hint = said.strip() or f"it ended with status {status}", f"look there: ssh {name}"
    if status == _SSH_FAILED:
        found, hint = said.strip() or "ssh failed", f"try it by hand: ssh {name}"
    return RemoteError(f"Running a command on {name}:", f"{found}.", hint)
