"""Files for what ranks can't send to each other: a rank's report, rank 0's last message, and who may speak.

report-RANK-ID.json   the last message of a rank that is not connected to rank 0
end.json              the last message of rank 0
leads, speaks         made by rank 0, and by the rank that speaks in its place
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from pathlib import Path

from cluster_ddp.agent.channel import Message
from cluster_ddp.run.files import atomic_write

LEADS, SPEAKS = "leads", "speaks"
_END = "end.json"
_STALE_S = 900.0
_NOWHERE = Path(os.devnull, "reports")  # nothing can be made there


class ReportFolder:
    """A folder for reports, which is made. Without a path, or if it can't be made, nothing is written or found."""

    def __init__(self, path: Path | None) -> None:
        self._path, self.is_there = path or _NOWHERE, False
        """Whether it could be made."""
        with contextlib.suppress(OSError):
            self._path.mkdir(exist_ok=True)
            self.is_there = True

    def is_first(self, name: str, *, otherwise: bool) -> bool:
        """Make the file LEADS or SPEAKS. Returns whether this process has made it; `otherwise` if none can."""
        marker = self._path / name
        try:
            with contextlib.suppress(FileNotFoundError):
                if time.time() - marker.stat().st_mtime > _STALE_S:  # of a doctor that was killed
                    marker.unlink()
            marker.touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            return otherwise
        return True

    def is_led(self) -> bool:
        """Return whether rank 0 has started."""
        return os.path.lexists(self._path / LEADS)

    def write_report(self, message: Message) -> None:
        """Write the last message of a rank; of rank 0, that of kind "end"."""
        with contextlib.suppress(OSError), atomic_write(self._path / _name(message)) as file:
            file.write(json.dumps(message).encode())

    def remove_report(self, message: Message) -> None:
        """Remove the report of the rank that has sent a message."""
        with contextlib.suppress(OSError):
            (self._path / _name(message)).unlink()

    def report_files(self) -> list[Path]:
        """Return the files of ranks that are not connected."""
        with contextlib.suppress(OSError):
            return list(self._path.glob("report-*.json"))
        return []

    def reports(self) -> list[Message]:
        """Return the messages in those files."""
        found = []
        for path in self.report_files():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # of another program
                message = dict(json.loads(path.read_text()))
                found.append({**message, "kind": str(message["kind"]), "rank": int(message["rank"])})
        return found

    def end(self) -> Message | None:
        """Return the last message of rank 0; None if there is none yet."""
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads((self._path / _END).read_text()))
        return None

    def remove(self) -> None:
        """Remove it, with all that is in it."""
        if self.is_there:
            shutil.rmtree(self._path, ignore_errors=True)


def _name(message: Message) -> str:
    return _END if message["kind"] == "end" else f"report-{message['rank']}-{message['id']}.json"
