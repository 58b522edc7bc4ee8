"""The job's virtual environment as one file, for --stage-env: each node unpacks it to its own disk.

An import of torch looks up thousands of files. On a shared file system that is cold or busy, this takes minutes, on
each rank. One large file is read at the speed of the file system instead.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import secrets
import stat
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from cluster_ddp.errors import RunDirError, SpecError
from cluster_ddp.run.files import make_dir, open_own
from cluster_ddp.run.ownership import refuse_others
from cluster_ddp.submission.spec import JobSpec

# The first lines of a script in bin/ that finds its interpreter beside itself, wherever that is. For sh, they run
# Python with the script; for Python, they are a string.
_ANY_PLACE = b"""#!/bin/sh
'''exec' "$(dirname -- "$(realpath -- "$0")")/python" "$0" "$@"
' '''
"""
_FIRST_LINES = re.compile(rb"#!(?:/bin/sh\n'''exec' )?\"?(?P<interpreter>[^\n\"]+?)\"?(?: \"\$0\" \"\$@\"\n' ''')?\n")
_COMPILED = "__pycache__"


def require(spec: JobSpec) -> Path:
    """Return the virtual environment to pack.

    Raises:
        SpecError: the job uses none, or one that can't be moved.
    """
    asked = "Staging the environment (--stage-env):"
    if spec.container or spec.container_image:
        raise SpecError(asked, "the job runs in a container, which is one file already.", "leave --stage-env out")
    if spec.conda_env is not None:
        reason = "a conda environment, whose files contain its absolute path, so they can't be moved."
        found = f"{spec.conda_env} is {reason}"
        hint = "use conda-pack (https://conda.github.io/conda-pack), and unpack its file in --setup; or use --venv"
        raise SpecError(asked, found, hint)
    if spec.venv is None:
        found = f"the job uses no virtual environment, but {sys.prefix}."
        hint = "make one: python -m venv .venv; .venv/bin/pip install -r requirements.txt; then --venv .venv"
        raise SpecError(asked, found, hint)
    if not Path(spec.venv, "pyvenv.cfg").is_file():
        found = "there is no pyvenv.cfg in it."
        raise SpecError(f"Packing the environment {spec.venv}:", found, "name a virtual environment: --venv PATH")
    return Path(spec.venv)


def path(venv: Path, folder: Path) -> Path:
    """Return where the archive of an environment belongs.

    Its name follows from the environment's path and its files' names, sizes and times (without Python's compiled
    files). So an environment is packed again only after a change, and a waiting job keeps the one that it was
    submitted with. It is in a folder of the user's, since several may share `folder`, that of their runs.
    """
    digest = hashlib.sha256(os.fsencode(venv))
    for name, entry in _entries(venv):
        seen = entry.lstat()
        if _COMPILED not in Path(name).parts and not stat.S_ISDIR(seen.st_mode):
            digest.update(f"\0{name}\0{seen.st_size}\0{seen.st_mtime_ns}".encode(errors="surrogateescape"))
    return folder / f"environments-{os.geteuid()}" / f"env-{digest.hexdigest()[:16]}.tar"


def pack(venv: Path, archive: Path, *, shared: bool) -> None:
    """Write the archive, as `path` names it, unless it is there already. Say so on stderr: it may take minutes.

    It appears whole or not at all; if `shared`, the group may read it. A folder that somebody else could have written
    is refused: the ranks will run what is in the archive. Scripts in bin/ find their interpreter beside themselves in
    it. Symbolic links stay links.

    Raises:
        RunDirError: a file can't be read or written; somebody else could have written the archive or its folder.
    """
    if os.path.lexists(archive):
        refuse_others(archive.parent)
        refuse_others(archive)
        return
    entries = list(_entries(venv))
    files = [seen for _, entry in entries if not stat.S_ISDIR((seen := entry.lstat()).st_mode)]
    what = f"{venv} ({len(files):,} files, {sum(file.st_size for file in files) / 1e9:.1f} GB)"
    print(f"Packing the environment {what} into {archive}, once …", file=sys.stderr, flush=True)
    temporary = archive.with_name(f".{archive.name}.{secrets.token_hex(4)}.tmp")
    try:
        with contextlib.suppress(FileExistsError):
            make_dir(archive.parent, shared=shared)
        refuse_others(archive.parent)
        _write(venv, entries, temporary, shared=shared)
        temporary.replace(archive)
    except (OSError, tarfile.TarError) as error:
        found = f"{getattr(error, 'strerror', None) or error}: {getattr(error, 'filename', None) or archive}."
        hint = "mend that, or choose another folder for it: --runs-dir PATH; or submit without --stage-env"
        raise RunDirError(f"Packing the environment {what} into {archive}:", found, hint) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _write(venv: Path, entries: list[tuple[str, Path]], target: Path, *, shared: bool) -> None:
    descriptor = open_own(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, shared=shared)
    with open(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, entry in entries:
            info = tar.gettarinfo(entry, arcname=name)
            if info is None:  # a socket
                continue  # type: ignore[unreachable]  # the stub does not know of it
            content = _moved_script(venv, entry) if info.isreg() and Path(name).parent == Path("bin") else None
            if content is not None:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
            elif info.isreg():
                with entry.open("rb") as source:
                    tar.addfile(info, source)
            else:
                tar.addfile(info)


def _moved_script(venv: Path, script: Path) -> bytes | None:
    """A script of the environment's Python, changed to run wherever it is; None for any other file."""
    with script.open("rb") as file:
        if file.read(2) != b"#!":
            return None
        content = b"#!" + file.read()
    match = _FIRST_LINES.match(content)
    if match is None or Path(os.fsdecode(match["interpreter"])).parent.resolve() != Path(venv, "bin").resolve():
        return None
    return _ANY_PLACE + content[match.end() :]


def _entries(venv: Path) -> Iterator[tuple[str, Path]]:
    """All files, links and folders of an environment, in order, each with its path in it."""
    for folder, folders, files in os.walk(venv):
        folders.sort()
        for name in sorted([*folders, *files]):
            entry = Path(folder, name)
            yield os.path.relpath(entry, venv), entry
