"""The agent in one file: always the same, for any Python from 3.9 on, and with all that it needs."""

from __future__ import annotations

import ast
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from slowness import LIMIT_S, scaled

from cluster_ddp.run import journal
from cluster_ddp.submission.frozen import frozen_agent


def pythons() -> dict[str, str]:
    """version -> interpreter, for this one, the oldest that is promised and an older one, of those that run here."""
    found = {"this": sys.executable}
    for version in ("3.9", "3.6"):
        candidates = [
            *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")),
            shutil.which(f"python{version}"),  # maybe pyenv's script, which takes a quarter of a second
        ]
        ask = ("-c", "import sys; print('%d.%d' % sys.version_info[:2])")
        for path in filter(None, candidates):
            if subprocess.run([path, *ask], capture_output=True, text=True).stdout.strip() == version:
                found[version] = path
                break
    return found


PYTHONS = pythons()


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "it's a folder" / "agent.pyz"
    path.parent.mkdir()
    path.write_bytes(frozen_agent.content())
    return path


def run(python: str, *words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run it as a batch script does, with a PYTHONPATH of modules that it must not see."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": "/nowhere", "PYTHONHOME": "", **env}
    return subprocess.run(
        [python, "-I", "-S", *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=scaled(LIMIT_S)
    )


def modules(archive: bytes) -> dict[str, str]:
    """name -> text of the modules in it."""
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        texts = {name: file.read(name).decode() for name in file.namelist() if name.endswith(".py")}
    return {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): text for name, text in texts.items()}


def test_the_same_content_is_the_same_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever it is made, and in whichever order a file system lists its files."""
    first = frozen_agent.content.__wrapped__()
    monkeypatch.setattr(frozen_agent.Path, "rglob", lambda path, pattern: [*sorted(path.glob("**/" + pattern))][::-1])
    monkeypatch.setattr("time.time", lambda: 2e9)
    assert frozen_agent.content.__wrapped__() == first
    assert len(first) < 300_000


@pytest.mark.parametrize("name", modules(frozen_agent.content()))
def test_each_module_is_one_for_python_3_9(name: str) -> None:
    ast.parse(modules(frozen_agent.content())[name], feature_version=(3, 9))


@pytest.mark.parametrize("version", [version for version in PYTHONS if version != "3.6"])
def test_all_is_imported_from_the_file_alone(archive: Path, version: str) -> None:
    code = (
        f"import sys; before = set(sys.modules); sys.path.insert(0, {str(archive)!r})\n"
        "import cluster_ddp.agent.__main__, cluster_ddp.agent.job.launch_job, cluster_ddp.agent.task.task, "
        "cluster_ddp.agent.job.pack.pack, cluster_ddp.agent.task.node_ranks\n"
        "import json; print(json.dumps({name: getattr(module, '__file__', '') or ''"
        " for name, module in sys.modules.items() if name not in before}))"
    )
    done = run(PYTHONS[version], "-c", code, cwd=archive.parent)
    assert done.returncode == 0, done.stderr
    imported = json.loads(done.stdout)
    ours = {name for name in imported if name.partition(".")[0] == "cluster_ddp"}
    assert ours | {"__main__"} == set(modules(archive.read_bytes()))
    assert all(imported[name].startswith(str(archive)) for name in ours)
    assert not [path for path in imported.values() if "site-packages" in path]


@pytest.mark.parametrize("version", [version for version in PYTHONS if version != "3.6"])
def test_it_runs_a_job_where_this_package_is_not(archive: Path, version: str) -> None:
    shows = 'echo "rank $RANK of $WORLD_SIZE at $MASTER_ADDR: $1"; [ "$RANK" = 0 ] || exit 7'
    words = ("job", "--ranks=2", f"--run-dir={archive.parent}/run", "--", "sh", "-c", shows, "sh", "it's $HOME")
    done = run(PYTHONS[version], str(archive), *words, cwd=archive.parent)
    assert done.returncode == 7, done.stderr
    assert (archive.parent / "run" / "task-1.log").read_text() == "rank 1 of 2 at 127.0.0.1: it's $HOME\n"
    ended = journal.last_end(archive.parent / "run")
    assert ended is not None and ended.first is not None
    assert (ended.state, ended.status, ended.first.rank) == ("FAILED", 7, 1)
    assert "Failed first, with status 7: rank 1 on " in done.stderr


@pytest.mark.skipif("3.6" not in PYTHONS, reason="no Python 3.6")
def test_an_older_python_is_told_so(archive: Path) -> None:
    done = run(PYTHONS["3.6"], str(archive), "job", "--ranks=1", "--", "true", cwd=archive.parent)
    assert done.returncode == 1
    assert "is Python 3.6: starting the ranks needs 3.9 or later. Hint: " in done.stderr
    assert "Traceback" not in done.stderr
