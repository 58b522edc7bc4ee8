"""Writing files that are whole or not there at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file that appears under its name only when the body has ended well.

    Written under a unique temporary name in the same folder, fsynced, then renamed; an error in the body leaves
    nothing. A killed process may leave `.<name>.<hex>.tmp`, which is harmless.

    Raises:
        OSError: the folder is missing, full or not writable.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
