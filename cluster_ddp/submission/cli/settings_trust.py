"""The content of a settings file. Its setup lines run as us: one that others could have written must be accepted.

In a folder that a group shares, that is normal. So `--accept cluster-toml` notes the content's hash in a file of the
user's, ~/.config/cluster_ddp/accepted: that content is then read without a question, wherever it is.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from pathlib import Path

from cluster_ddp.errors import ProfileError
from cluster_ddp.files import make_dir, open_own
from cluster_ddp.ownership import others, refuse_others

CODE = "cluster-toml"
"""The code that accepts such a file: --accept cluster-toml."""


def read(path: Path, accepted: Path | None, *, accept: bool) -> bytes:
    """Read a settings file.

    Args:
        path: the file.
        accepted: file of the user's with the hashes of accepted contents; None if the user has no home directory.
        accept: whether the user accepts the file as it is now, which is then noted.

    Raises:
        ProfileError: it can't be read; or others could have written it, and this content was never accepted.
        RunDirError: others could have written the user's file with the hashes.
    """
    try:
        real = Path(os.path.realpath(path, strict=True))
        found = _others_of(path, real)
        if found and not real.is_file():
            raise error(str(path), f"{found}, and is no regular file.", f"see what it is: ls -ld {_quoted(path)}")
        content = real.read_bytes()
        if found and not _is_accepted(content, accepted, accept=accept):
            hint = (
                f"read it: cat {_quoted(path)}; then submit with --accept {CODE} once, which holds until it changes; "
                f"or copy it to a folder of your own; if it is yours alone: chmod go-w {_quoted(path)}"
            )
            raise error(str(path), f"{found}. Its settings and setup lines would run as you.", hint)
    except OSError as failed:
        raise error(str(path), f"{failed.strerror}.", f"see what it is: ls -ld {_quoted(path)}") from failed
    return content


def error(origin: str, found: str, hint: str) -> ProfileError:
    """Return the error that a settings file has."""
    return ProfileError(f"Reading the settings in {origin}:", found, hint)


def _others_of(*paths: Path) -> str:
    """Who else could have written or replaced one of these, or its folder; empty if nobody could."""
    entries = dict.fromkeys(entry for path in paths for entry in (path, path.parent))
    return next((f"{entry} {found}" for entry in entries if (found := others(entry.lstat()))), "")


def _is_accepted(content: bytes, accepted: Path | None, *, accept: bool) -> bool:
    digest = hashlib.sha256(content).hexdigest()
    if accepted is None:
        return accept
    if os.path.lexists(accepted):
        refuse_others(accepted)
        if digest in accepted.read_text().split():
            return True
    if accept:
        if not accepted.parent.exists():
            make_dir(accepted.parent, shared=False)
        with open(open_own(accepted, os.O_WRONLY | os.O_CREAT | os.O_APPEND, shared=False), "w") as file:
            file.write(f"{digest}\n")
        refuse_others(accepted)
    return accept


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
