"""metrics.jsonl, one record per line, written in the background: a full disk or one that hangs stops no training."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
from pathlib import Path

from cluster_ddp.errors import RunDirError
from cluster_ddp.run.files import is_at, sync_folder
from cluster_ddp.runtime.run_dir import fenced_writes
from cluster_ddp.runtime.run_dir.background_writer import BackgroundWriter
from cluster_ddp.runtime.run_dir.fenced_writes import atomic_write, open_own

log = logging.getLogger("cluster_ddp")

_MAX_WAITING_BYTES = 256 << 20  # about a million records
_BLOCK_BYTES = 1 << 20


class MetricsFile:
    """A file to which whole lines are appended, in order, in a thread.

    The file of an earlier run is renamed at the first write, or continued after `continue_at`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._written = 0  # bytes of the file
        self._waiting = bytearray()  # what follows them
        self._failure: str | None = None
        self.is_continued = False
        """Whether it continues the file of an earlier start of this training."""
        self._is_begun = False  # a queued write will take what is waiting
        self._count, self._io = threading.Lock(), threading.Lock()  # lock the counts above; lock the file
        self.writer = BackgroundWriter("metrics")

    @property
    def size(self) -> int:
        """The file's size in bytes with all records so far."""
        with self._count:
            return self._written + len(self._waiting)

    @property
    def written(self) -> int | None:
        """The bytes of this training that are in the file; None before the file of an earlier run is out of the way."""
        with self._count:
            return None if self._file is None else self._written

    def append(self, line: bytes) -> None:
        """Append a line, which has its line break.

        Raises:
            RunDirError: more than 256 MiB are waiting already, or a newer start of the job has taken the run directory.
        """
        self.writer.check()
        with self._count:
            if len(self._waiting) > _MAX_WAITING_BYTES:
                found = f"{len(self._waiting)} bytes wait to be written: {self._failure or 'its file system hangs'}."
                raise RunDirError(f"Recording more in {self.path}:", found, "see the errors above; df -h, quota")
            self._waiting += line
        self.begin_write()
        self.writer.tell_if_slow()

    def begin_write(self) -> None:
        """Start to write what is waiting. The first write renames the file of an earlier run."""
        with self._count:
            is_begun, self._is_begun = self._is_begun, True
        if not is_begun:
            self.writer.begin(self.path, self._write)

    def continue_at(self, size: int) -> None:
        """Continue after the first `size` bytes; cut off the rest, since it will be recorded again.

        Raises:
            OSError: the file can't be written.
        """
        with self._io:
            self.is_continued = True
            self._file = self._open()
            found = os.fstat(self._file).st_size
            if found < size:
                log.warning("%s has lost the last %d bytes before the checkpoint.", self.path, size - found)
                size = os.pread(self._file, found, 0).rfind(b"\n") + 1  # whole lines
            os.ftruncate(self._file, size)
            self._written = size

    def sync(self) -> None:
        """Write all that is waiting and fsync it. Make the file again if it was removed.

        Raises:
            RunDirError: a newer start of the job has taken the run directory.
            OSError: the file can't be written, such as on a full disk.
        """
        with self._io:
            self._put_back()
            self._write_waiting()
            if self._file is not None:
                os.fsync(self._file)
                sync_folder(self.path.parent)

    def finish(self, timeout_s: float) -> str | None:
        """Write what is left; return what is not on disk after `timeout_s` seconds, in words; None if all is."""
        self.begin_write()
        if not self.writer.wait(timeout_s):
            return f"still being written: {self.writer.at_work()}"
        with self._count:
            records = self._waiting.count(b"\n")
        return f"{self.path} lacks its last {records} records: {self._failure}" if records else None

    def _write(self) -> None:
        with self._count:
            self._is_begun = False  # later lines need another write
        try:
            with self._io:
                self._write_waiting()
            self._failure = None
        except OSError as error:
            if self._failure is None:
                log.error("Writing to %s failed: %s. Training continues; it is tried again.", self.path, error.strerror)
            self._failure = error.strerror or str(error)

    def _write_waiting(self) -> None:
        fenced_writes.check()
        if self._file is None:
            set_aside(self.path)
            self._file = self._open()
        while self._waiting:
            written = os.pwrite(self._file, self._waiting[:_BLOCK_BYTES], self._written)
            with self._count:
                self._written += written
                del self._waiting[:written]

    def _open(self) -> int:
        return open_own(self.path, os.O_RDWR | os.O_CREAT)

    def _put_back(self) -> None:
        """If the file was removed or replaced, copy it from the one that is still open."""
        if self._file is None or is_at(self._file, self.path):
            return
        log.warning("%s was removed or replaced while this run wrote to it; it is made again.", self.path)
        set_aside(self.path)
        try:
            self._copy(self._file)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            os.close(self._file)  # on NFS, a file that another node has removed can't be read
            with self._count:
                self._file, self._written = None, 0
            raise OSError(error.errno, f"the records before are lost: {error.strerror}") from error

    def _copy(self, old: int) -> None:
        with atomic_write(self.path) as file:
            while block := os.pread(old, min(_BLOCK_BYTES, self._written - file.tell()), file.tell()):
                file.write(block)
        self._file = self._open()
        os.close(old)


def set_aside(path: Path) -> None:
    """Rename another run's file or folder, if it exists and is no empty file: metrics.jsonl to metrics.1.jsonl.

    Raises:
        RunDirError: a newer start of the job has taken the run directory.
        OSError: it can't be renamed.
    """
    if not path.exists() or (path.is_file() and path.stat().st_size == 0):
        return
    numbers = itertools.count(1)
    others = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in numbers)
    other = next(other for other in others if not other.exists())
    fenced_writes.check()
    log.info("%s of an earlier run is now %s.", path, other.name)
    path.rename(other)
