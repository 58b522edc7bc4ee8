"""The wheel in an empty environment: what a plain `pip install` gives, in a folder that is not the checkout.

Were pip to fetch all that the wheel needs, each run of the tests would load gigabytes. So the environment is made
of what is installed beside these tests: the files, as links, of the distributions that the wheel's metadata asks for,
and of those that they ask for. pip adds the wheel itself. What the metadata does not ask for is not there.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from slowness import LIMIT_S, scaled

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
TRAIN = ("-m", "cluster_ddp.train", "--dataset", "digits", "--epochs", "1")
OWN_SCRIPT = """
import cluster_ddp

with cluster_ddp.distributed() as world:
    world.print(world.gather({"rank": world.rank}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), "."]
    subprocess.run(build, cwd=ROOT, check=True, timeout=scaled(LIMIT_S))
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The Python of the environment."""
    folder = tmp_path_factory.mktemp("plain") / "env"
    venv.create(folder)
    bases = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", scheme="posix_prefix", vars=bases))
    python = folder / "bin" / "python"
    install = [*PIP, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, timeout=scaled(LIMIT_S))
    (installed,) = Distribution.discover(name="cluster-ddp", path=[str(site)])
    for one in needed(installed.requires or []):
        link(one, site)
    yield python
    shutil.rmtree(folder)


def needed(texts: Iterable[str]) -> list[Distribution]:
    """What pip would install for requirements, out of what is installed here."""
    found: dict[tuple[str, str], Distribution] = {}
    waiting = [Requirement(text) for text in texts if applies(text, "")]
    while waiting:
        wanted = waiting.pop()
        one = distribution(wanted.name)
        assert wanted.specifier.contains(one.version, prereleases=True), f"{wanted}: {one.version} is here"
        for extra in ["", *wanted.extras]:
            if (wanted.name, extra) not in found:
                found[wanted.name, extra] = one
                waiting += [Requirement(text) for text in one.requires or [] if applies(text, extra)]
    return [one for (_, extra), one in found.items() if not extra]


def applies(requirement: str, extra: str) -> bool:
    marker = Requirement(requirement).marker
    return marker is None or marker.evaluate({"extra": extra})


def link(one: Distribution, site: Path) -> None:
    assert one.files, f"{one.metadata['Name']} has no list of its files"
    for file in one.files:
        if ".." not in file.parts:  # but its commands, which are of the other environment
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            if not (site / file).exists():  # two names of one distribution
                (site / file).symlink_to(one.locate_file(file))


def run(command: Sequence[str | Path], folder: Path, *, ranks: int = 1) -> str:
    """Run a command to its end, as so many ranks, by a launcher's variables; what rank 0 printed."""
    clean = {"PATH": os.environ["PATH"], "HOME": str(folder), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with socket.create_server(("127.0.0.1", 0)) as server:
        world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
    places = [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)] if ranks > 1 else [{}]

    def one(place: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        words = [str(word) for word in command]
        return subprocess.run(
            words, cwd=folder, env={**clean, **place}, capture_output=True, text=True, timeout=scaled(LIMIT_S)
        )

    with ThreadPoolExecutor() as pool:
        ends = list(pool.map(one, places))
    assert not any(done.returncode for done in ends), "\n".join(done.stdout + done.stderr for done in ends)
    return ends[0].stdout


def test_the_wheel_has_all_templates_and_is_typed(wheel: Path) -> None:
    templates = {f"cluster_ddp/templates/{path.name}" for path in (ROOT / "templates").iterdir()}
    assert {*templates, "cluster_ddp/py.typed"} <= set(zipfile.ZipFile(wheel).namelist())


def test_the_environment_has_what_the_wheel_asks_for_and_nothing_else(python: Path, tmp_path: Path) -> None:
    look = "import cluster_ddp, importlib.util; print(cluster_ddp.__file__, importlib.util.find_spec('pytest'))"
    place, pytests = run([python, "-c", look], tmp_path).split()
    assert Path(place).is_relative_to(python.parents[1])
    assert pytests == "None"


def test_the_digits_are_learned(python: Path, tmp_path: Path) -> None:
    said = run([python, *TRAIN], tmp_path)
    assert "1 rank, 1437 training samples" in said
    assert "Test set: Average loss" in said


def test_a_script_of_ones_own_gathers_objects(python: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_SCRIPT)
    assert str([{"rank": 0}, {"rank": 1}]) in run([python, "own.py"], tmp_path, ranks=2)


def test_jobs_are_rendered(python: Path, tmp_path: Path) -> None:
    command = ("submit", "--nodes", "2", "--gpus-per-node", "2", "--dry-run")
    said = run([python.parent / "cluster-ddp", *command], tmp_path)
    assert "#SBATCH --nodes=2" in said
    again = run([python, "-m", f"cluster_ddp.{command[0]}", *command[1:]], tmp_path)
    ours, theirs = (re.sub(r"mnist-\d{8}-\d{6}-[0-9a-f]{6}", "mnist-NEW", one) for one in (said, again))
    assert ours == theirs
    assert run([python.parent / "cluster-ddp", "status"], tmp_path).startswith("No runs in runs.")
