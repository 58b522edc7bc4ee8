"""The agent as one file, which a job starts with: an upgrade of the package changes no job that waits or is requeued.

Slurm freezes the batch script at its submission; this freezes what the script starts. The file (a zipapp, PEP 441) has
the modules of `cluster_ddp.agent` and those that they import, and needs Python 3.9 or later and nothing else. Beside
each is what this Python has compiled of it, which halves the start of a task; another Python compiles it anew.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import marshal
import zipfile
from functools import cache
from pathlib import Path

from cluster_ddp.run.files import atomic_write

_PACKAGE = Path(__file__).parents[2]
OTHERS = ("errors", "option_form", "processes", "slurm/port", "slurm/variables")
"""What `agent` imports of this package, beside `run`."""
# Of all modules, this one alone is compiled by a Python that is too old for the others.
_MAIN = """\
import sys
if sys.version_info < (3, 9):
    found = "Python %d.%d: starting the ranks needs 3.9 or later" % sys.version_info[:2]
    sys.exit("error: %s is %s. Hint: a module that has one: --modules python" % (sys.executable, found))
from cluster_ddp.agent.__main__ import run
run()
"""
_RUN_ONCE = (  # in a job, or on a node, and are not compiled
    *("cluster_ddp/agent/job/", "cluster_ddp/agent/channel_server.py", "cluster_ddp/agent/task/node_ranks.py"),
    *("cluster_ddp/agent/first_failure.py", "cluster_ddp/agent/array_values.py", "cluster_ddp/run/job_file.py"),
    *("cluster_ddp/run/failure_kind.py", "cluster_ddp/run/fence.py", "cluster_ddp/run/journal.py"),
)
_AT = (1980, 1, 1, 0, 0, 0)  # the first time that a zip file can have: equal content gives equal files


@cache
def content() -> bytes:
    """Return the content of the file."""
    files = {"__main__.py": _MAIN, "cluster_ddp/__init__.py": "", "cluster_ddp/slurm/__init__.py": ""}
    paths = [_PACKAGE / f"{name}.py" for name in OTHERS]
    paths += [path for package in ("agent", "run") for path in sorted((_PACKAGE / package).rglob("*.py"))]
    files |= {f"cluster_ddp/{path.relative_to(_PACKAGE)}": path.read_text() for path in paths}
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name, _AT), text, zipfile.ZIP_DEFLATED)
            if not name.startswith(_RUN_ONCE):
                archive.writestr(zipfile.ZipInfo(f"{name}c", _AT), _compiled(name, text), zipfile.ZIP_DEFLATED)
    return made.getvalue()


def write(folder: Path) -> Path:
    """Write the file into a run directory, under a name of its content: a job may wait there with another one.

    Raises:
        OSError: it can't be written.
    """
    path = folder / f"agent-{hashlib.sha256(content()).hexdigest()[:12]}.pyz"
    with atomic_write(path) as file:
        file.write(content())
    return path


def _compiled(name: str, text: str) -> bytes:
    """What a .pyc file has (PEP 552): only a Python with the same magic number takes it. Docstrings are left out."""
    code = marshal.dumps(compile(text, name, "exec", dont_inherit=True, optimize=2))
    unchecked = (1).to_bytes(4, "little")
    return importlib.util.MAGIC_NUMBER + unchecked + importlib.util.source_hash(text.encode()) + code
