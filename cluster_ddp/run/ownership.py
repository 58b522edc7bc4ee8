"""Who else could have written a file or a folder: its content may run as us."""

from __future__ import annotations

import grp
import os
import pwd
import shlex
import stat
from pathlib import Path

from cluster_ddp.errors import RunDirError

_OTHERS_ENTER = stat.S_IXGRP | stat.S_IXOTH


def others(seen: os.stat_result) -> str:
    """Say who else could have written a file, or changed the entries of a folder.

    Args:
        seen: what lstat says of it; stat would follow a link, which its owner can point elsewhere.

    Returns:
        Such as "belongs to user ann (1001), mode 0644", or "may be written by others: user ann (1001), mode 0664".
        Empty if only we and root can. In a folder with the sticky bit, such as /tmp, others can't replace our files.
        Nobody else is in a user's private group, which has the user's name (pam_umask(8)).
    """
    mode, user = stat.S_IMODE(seen.st_mode), _user(seen.st_uid)
    words = f"user {f'{user} ({seen.st_uid})' if user else seen.st_uid}, mode {mode:04o}"
    if seen.st_uid not in (0, os.geteuid()):
        return f"belongs to {words}"
    may_write = mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _is_private(seen.st_gid, user))
    is_protected = stat.S_ISLNK(seen.st_mode) or (stat.S_ISDIR(seen.st_mode) and mode & stat.S_ISVTX)
    return f"may be written by others: {words}" if may_write and not is_protected else ""


def _user(uid: int) -> str:
    """The login name of a user; empty if there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""


def _is_private(gid: int, user: str) -> bool:
    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == user and not {*group.gr_mem} - {user}


def refuse_others(path: Path) -> None:
    """Refuse a file that somebody else could have written, or a folder, since its content will be run.

    Args:
        path: a file, which is refused for its folder, too; or a folder.

    Raises:
        RunDirError: it is missing, or neither a regular file nor a folder; somebody else could have written it.
    """
    asked = f"Using {path}:"
    try:
        entry = path.lstat()
        folder = entry if stat.S_ISDIR(entry.st_mode) else path.parent.stat()
    except OSError as error:
        raise RunDirError(asked, f"{error.strerror}.", "give the run directory of a job of yours") from error
    if not (stat.S_ISREG(entry.st_mode) or entry is folder):
        found = f"it is not a regular file, but {stat.filemode(entry.st_mode)} of user {entry.st_uid}."
        raise RunDirError(asked, found, f"see what it is: ls -ld {shlex.quote(str(path))}")
    found = others(folder)
    if not found and (entry.st_uid != folder.st_uid or folder.st_mode & _OTHERS_ENTER):
        found = others(entry)
    if found:
        mend = f"chmod -R go-w {shlex.quote(str(path if entry is folder else path.parent))}"
        hint = f"use one that you have made; if you did, check that nobody has changed it, then: {mend}"
        raise RunDirError(asked, f"it or its folder {found}. Its content would run as you.", hint)
