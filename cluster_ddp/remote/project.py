"""The copy of a project on another machine: an ordinary folder, with data, environment and runs of its own.

The files that git knows or would add are copied, not those that it ignores. What has been deleted here since the last
copy is deleted there; nothing else is.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import shlex
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cluster_ddp._version import __version__
from cluster_ddp.errors import RemoteError, RunDirError
from cluster_ddp.remote.host import Host, connect
from cluster_ddp.submission.frozen import code_snapshot

RECORD = ".cluster-ddp-copy.json"
"""The file in the folder there that says which project it is a copy of, and what was copied."""

_OTHERS = "other files"
_PROBE = f"""
cd -- "$1" 2>/dev/null || {{ echo null; exit 0; }}
if [[ -f {RECORD} ]]; then cat {RECORD}; elif [[ $(ls -A | grep -vx .venv) ]]; then echo '"other"'; else echo null; fi
"""
_IN_FOLDER = 'cd -- "$1/$2" && shift 2 && exec "$@"'
_PROGRAM = """
program=$(cd -- "$1" && [[ -x .venv/bin/cluster-ddp ]] && echo "$PWD/.venv/bin/cluster-ddp")
[[ $program ]] || program=$(type -P cluster-ddp)
echo "$program"
[[ ! $program ]] || "$program" --version
type -P sbatch
true
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Project:
    """A project, and the folder of its copy there."""

    host: Host
    """The machine of the copy."""
    root: Path
    """The top of the git checkout here."""
    folder: str
    """The folder there; relative to the home directory unless it begins with a slash."""
    subfolder: PurePosixPath
    """The working folder here, relative to `root`; so it is there."""

    @property
    def origin(self) -> str:
        """What the record there says of the project here."""
        return f"{getpass.getuser()}@{socket.gethostname()}:{self.root}"

    @property
    def place(self) -> str:
        """The folder there, for messages."""
        return f"{self.host.name}:{self.folder}"

    def copied_before(self) -> list[str]:
        """Return the files that the last copy has; empty without a copy.

        Raises:
            RemoteError: the folder there has other files, or is the copy of another project.
        """
        try:
            record = json.loads(self.host.answer(_PROBE, self.folder))
            origin, files = (None, []) if record is None else (record["origin"], list(record["files"]))
        except (ValueError, TypeError, KeyError):
            origin, files = _OTHERS, []
        if origin not in (None, self.origin):
            found = f"the folder has {origin if origin == _OTHERS else f'the copy of {origin}'} already."
            hint = f"choose another folder: --on {self.host.name}:FOLDER"
            raise RemoteError(f"Copying {self.root} to {self.place}:", found, hint)
        return files

    def update(self) -> None:
        """Copy the files there, and delete those that are no longer here.

        Raises:
            RemoteError: the folder there is not this project's, or rsync failed.
            RunDirError: git can't list the files.
        """
        files = code_snapshot.files(self.root)
        both = sorted({*files, *self.copied_before()})
        self.host.answer('mkdir -p -m 700 -- "$1"', self.folder)
        how = ("--archive", "--recursive", "--exclude=.git", "--from0", "--files-from=-", "--delete-missing-args")
        names = "".join(f"{name}\0" for name in both)
        self.host.rsync(how, self.root, self.folder, stdin=names.encode(errors="surrogateescape"))
        record = json.dumps({"origin": self.origin, "files": files})
        self.host.answer(f'umask 077 && cat >"$1"/{RECORD}', self.folder, stdin=record)

    def require(self) -> None:
        """Check that it was copied. Raises RemoteError if not."""
        if not self.copied_before():
            found = f"nothing was submitted to it from {self.root}."
            hint = f"cluster-ddp submit --on {self.place} …; or --on {self.host.name}:FOLDER, if you used another"
            raise RemoteError(f"Looking into {self.place}:", found, f"{hint} folder")

    def answer(self, *words: str) -> str:
        """Run a command in the working folder there. Returns what it printed. Raises what `Host.answer` raises."""
        return self.host.answer(_IN_FOLDER, self.folder, str(self.subfolder), *words)

    def run(self, *words: str) -> int:
        """Run a command in the working folder there, on this terminal. Raises what `Host.run` raises."""
        return self.host.run(_IN_FOLDER, self.folder, str(self.subfolder), *words)

    def program(self, *, needs_slurm: bool) -> tuple[str, str]:
        """Find this toolkit there, and sbatch if that is needed. Returns the path of its cluster-ddp, and its version.

        Raises:
            RemoteError: it is not there, or sbatch is not.
        """
        program, *lines = self.host.answer(_PROGRAM, self.folder).splitlines() or [""]
        asked = f"Using cluster-ddp on {self.host.name}:"
        if not program:
            found = f"it is neither in {self.folder}/.venv/bin nor on the PATH of a login shell."
            make = "python3 -m venv .venv && .venv/bin/pip install PATH_OF_ITS_CHECKOUT"
            install = f"ssh {self.host.name} {shlex.quote(f'cd {shlex.quote(self.folder)} && {make}')}"
            raise RemoteError(asked, found, f"install version {__version__} there, from a checkout: {install}")
        version, *sbatch = lines or ["an unknown version"]
        if needs_slurm and not sbatch:
            found = "there is no sbatch on the PATH of a login shell."
            hint = "name a login node; or load Slurm in ~/.bash_profile there: module load slurm"
            raise RemoteError(asked, found, hint)
        return program, version.removeprefix("cluster-ddp ")


@contextlib.contextmanager
def connected(where: str) -> Iterator[Project]:
    """Return the project of the working folder on the machine of an option --on, HOST or HOST:FOLDER.

    Raises:
        RemoteError: there is no ssh here, or the working folder is not in a git checkout.
    """
    name, _, folder = where.partition(":")
    with connect(name) as host:
        yield find(host, folder)


def find(host: Host, folder: str) -> Project:
    """Return the project of the working folder.

    Args:
        host: the machine of its copy.
        folder: the folder there; empty for cluster_ddp/NAME in the home directory, NAME being that of the checkout.

    Raises:
        RemoteError: the working folder is not in a git checkout.
    """
    try:
        root = code_snapshot.root(Path.cwd())
    except RunDirError as error:
        hint = "go to the project that you submit from; it must be a git checkout: git init"
        raise RemoteError(f"Finding the copy of {Path.cwd()} on {host.name}:", error.found, hint) from error
    return Project(
        host=host,
        root=root,
        folder=folder.removeprefix("~/") or f"cluster_ddp/{root.name}",
        subfolder=PurePosixPath(Path.cwd().resolve().relative_to(root.resolve())),
    )
