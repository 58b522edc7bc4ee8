"""`--stage-env`: each node unpacks the environment, ranks import from there, and nothing of it is left."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from cluster import SUBMIT, Cluster, Place, output
from slowness import wait_until
from strangers import as_stranger, folder_of_all
from venvs import make_venv

pytestmark = pytest.mark.full

TWO_BY_TWO = ("--nodes", "2", "--gpus-per-node", "2", "--stage-env")
SHOW = """import os, pathlib, shutil, subprocess, sys, time
import packed
tool = subprocess.run(["tool"], capture_output=True, text=True).stdout.strip()
seen = [sys.prefix, packed.__file__, tool, os.environ["VIRTUAL_ENV"]]
pathlib.Path(os.environ["CLUSTER_DDP_RUN_DIR"], f"seen-{os.environ['RANK']}").write_text("\\n".join(seen))
time.sleep(float(os.environ.get("WAIT_S", 0)))
"""


@pytest.fixture
def place(slurm: Cluster, tmp_path: Path) -> Place:
    """A project with an environment of its own, which finds torch in that of the tests, and a script of that."""
    folder = tmp_path / "it's staged"
    venv = folder / "my env"
    packages = make_venv(venv)
    (packages / "tests.pth").write_text("".join(f"{path}\n" for path in sys.path if path))
    (packages / "packed.py").write_text("")
    first = f"#!/bin/sh\n'''exec' \"{venv}/bin/python\" \"$0\" \"$@\"\n' '''\n"  # pip's form for a path with blanks
    (venv / "bin" / "tool").write_text(f"{first}import sys\nprint(sys.prefix)\n")
    (venv / "bin" / "tool").chmod(0o755)
    (folder / "show.py").write_text(SHOW)
    (folder / "disk").mkdir()
    return Place(slurm, folder)


def start(place: Place, *words: str) -> Path:
    """Submit from the project's own environment, with node-local disks in the test's folder."""
    python = str(place.folder / "my env" / "bin" / "python")
    setup = ("--setup", f'export SLURM_TMPDIR="{place.folder / "disk"}"')
    return place.start(*setup, *words, program=(python, *SUBMIT[1:]))


def seen(run_dir: Path, rank: int) -> list[str]:
    return (run_dir / f"seen-{rank}").read_text().splitlines()


@pytest.mark.parametrize(("launcher", "each"), [("srun", 2), ("fork", 1)])
def test_ranks_use_what_their_node_has_unpacked(place: Place, launcher: str, each: int) -> None:
    program = "python" if launcher != "srun" else str(place.folder / "my env" / "bin" / "python")
    size = ("--nodes", "2", "--gpus-per-node", str(each), "--stage-env")
    run_dir = start(place, *size, "--launcher", launcher, "--name", launcher, "--", program, "show.py")
    place.completed(run_dir)
    label = run_dir.name.rpartition("-")[2]
    assert list((place.folder / "disk").iterdir()) == [], "a copy is removed when the node's last rank has ended"
    for rank in range(2 * each):
        copy = Path(seen(run_dir, rank)[0])
        assert copy.parent == place.folder / "disk"
        assert re.fullmatch(rf"cluster_ddp-env-{label}-\w{{16}}-{rank // each}", copy.name)
        assert seen(run_dir, rank)[1].startswith(f"{copy}/lib/")
        assert seen(run_dir, rank)[2:] == [str(copy)] * 2
    assert "Unpacked the environment on 2 node(s) in " in output(run_dir)


def test_a_node_that_cannot_unpack_uses_the_environment_as_it_is(place: Place) -> None:
    (place.folder / "disk").rmdir()
    run_dir = start(place, *TWO_BY_TWO, "--name", "full", "--", "python", "show.py")
    place.completed(run_dir)
    venv = str(place.folder / "my env")
    assert [seen(run_dir, rank)[0] for rank in range(4)] == [venv] * 4
    said = output(run_dir)
    assert said.count("could not unpack the environment (") == said.count(f"Its ranks import from {venv}.") == 2, said


def test_a_cancelled_job_leaves_no_copy(place: Place) -> None:
    run_dir = start(place, *TWO_BY_TWO, "--name", "gone", "--", "env", "WAIT_S=600", "python", "show.py")
    wait_until(lambda: len(list(run_dir.glob("seen-*"))) == 4, said=lambda: output(run_dir))
    assert len(list((place.folder / "disk").iterdir())) == 2
    place.slurm.run("scancel", run_dir.name.rpartition("-")[2], cwd=place.folder)
    disk = place.folder / "disk"
    wait_until(lambda: not list(disk.iterdir()), said=lambda: list(disk.iterdir()))


def test_a_function_is_called_by_the_copys_python(place: Place) -> None:
    python = str(place.folder / "my env" / "bin" / "python")
    (place.folder / "mine.py").write_text("import sys\n\ndef prefix(world):\n    return sys.prefix\n")
    setup = f'export SLURM_TMPDIR="{place.folder}/disk"'
    text = f"""import cluster_ddp, mine
spec = cluster_ddp.JobSpec(name="function", stage_env=True, setup=({setup!r},))
job = cluster_ddp.submit(spec, mine.prefix)
print(job.id, job.result(), sep="\\n")
"""
    done = place.slurm.run(python, "-c", text, cwd=place.folder)
    assert done.returncode == 0, done.stderr
    label, prefix = done.stdout.splitlines()
    assert re.fullmatch(rf"{re.escape(str(place.folder))}/disk/cluster_ddp-env-{label}-\w{{16}}-0", prefix)


def test_an_archive_that_a_stranger_has_put_there_is_not_unpacked(place: Place) -> None:
    """While the job waits: the folder of the archives is renamed in a runs folder that everybody can write."""
    with folder_of_all(0o777) as runs:
        words = (*TWO_BY_TWO, "--runs-dir", str(runs), "--begin", "now+1hour", "--name", "late")
        run_dir = start(place, *words, "--", "python", "show.py")
        (archives,) = runs.glob("environments-*")
        archive = next(archives.iterdir()).name
        swap = f"mv {archives} {runs}/old && mkdir {archives} && tar -cf {archives}/{archive} --files-from=/dev/null"
        assert as_stranger("sh", "-c", f"{swap} && chmod -R a+rX {archives}").returncode == 0
        job = run_dir.name.rpartition("-")[2]
        assert place.slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now").returncode == 0
        place.completed(run_dir)
        assert [seen(run_dir, rank)[0] for rank in range(4)] == [str(place.folder / "my env")] * 4
        assert f"{archive} is not a file of yours" in output(run_dir)
