"""A file or a folder that appears under its name only once all of it is on disk, and that replaces nothing."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster_ddp.errors import CheckpointError, SpecError
from cluster_ddp.files import sync_folder
from cluster_ddp.runtime.run_dir import fenced_writes


def refuse_taken(output: Path) -> None:
    """Check that an output can be made here.

    Raises:
        SpecError: something has that name, or its folder does not exist.
    """
    asked = f"Writing {output}:"
    if os.path.lexists(output):
        raise SpecError(asked, "it exists, and is not replaced.", "choose another name, or move it away")
    if not output.parent.is_dir():
        found = f"there is no folder {output.parent}."
        raise SpecError(asked, found, f"mkdir -p {shlex.quote(str(output.parent))}")


@contextmanager
def appearing(output: Path) -> Iterator[Path]:
    """Yield a temporary path beside an output, for a file or a folder that then gets the output's name.

    After an error nothing is left. A killed process may leave `.<name>.<hex>.tmp`.

    Raises:
        SpecError: as `refuse_taken`.
        CheckpointError: it can't be written.
    """
    refuse_taken(output)
    temporary = output.with_name(f".{output.name}.{os.urandom(4).hex()}.tmp")
    try:
        yield temporary
        _sync(temporary)
        refuse_taken(output)
        temporary.rename(output)
        sync_folder(output.parent)
    except Exception as error:  # each library has its own for a full disk
        if words := _of_the_disk(error):
            raise CheckpointError(f"Writing {output}:", f"{words}.", "free space there: df -h, quota") from error
        raise
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    if path.is_dir():
        sync_folder(path)
        return
    descriptor = fenced_writes.open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _of_the_disk(error: Exception) -> str | None:
    """What the disk said, if it was the disk. torch.save hides it."""
    found = next((one for one in (error, error.__context__) if isinstance(one, OSError)), None)
    if found is not None:
        return found.strerror or str(found)
    return str(error) if type(error).__name__ == "SafetensorError" else None
