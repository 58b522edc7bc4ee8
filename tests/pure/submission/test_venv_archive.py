from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from strangers import STRANGER, as_stranger, folder_of_all, needs_a_stranger
from venvs import make_venv

from cluster_ddp.errors import RunDirError, SpecError
from cluster_ddp.submission.frozen import venv_archive
from cluster_ddp.submission.planning import Plan
from cluster_ddp.submission.spec import JobSpec

SPEC = JobSpec(name="x", command=("true",), stage_env=True)
LONG_FORM = "#!/bin/sh\n'''exec' \"{}\" \"$0\" \"$@\"\n' '''\n"  # pip's, if the path is long or has blanks


def package_folder(venv: Path) -> Path:
    return next(venv.glob("lib/python*/site-packages"))


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A virtual environment with a module and three scripts."""
    venv = tmp_path / "it's an env"
    make_venv(venv)
    (package_folder(venv) / "packed.py").write_text("")
    says = "import packed, sys\nprint(packed.__file__, sys.prefix, *sys.argv[1:])\n"
    for name, first in {
        "short": f"#!{venv}/bin/python\n",
        "long": LONG_FORM.format(venv / "bin" / "python3"),
        "other": "#!/usr/bin/env python\n",
    }.items():
        (venv / "bin" / name).write_text(first + says)
        (venv / "bin" / name).chmod(0o755)
    return venv


def unpacked(venv: Path, folder: Path) -> Path:
    archive = venv_archive.path(venv, folder)
    venv_archive.pack(venv, archive, shared=False)
    copy = folder / "a copy"
    copy.mkdir()
    subprocess.run(["tar", "--extract", "--file", archive, "--directory", copy], check=True)
    return copy


@pytest.mark.parametrize("program", [("bin/short",), ("bin/long",), ("bin/python", "bin/short")])
def test_the_copy_works_alone(venv: Path, tmp_path: Path, program: tuple[str, ...]) -> None:
    copy = unpacked(venv, tmp_path)
    shutil.rmtree(venv)
    words = [str(copy / word) for word in program]
    said = subprocess.run([*words, "a b"], capture_output=True, text=True, check=True).stdout
    assert said == f"{package_folder(copy)}/packed.py {copy} a b\n"


def test_all_else_is_kept_as_it_is(venv: Path, tmp_path: Path) -> None:
    (package_folder(venv) / "linked").symlink_to("packed.py")
    (package_folder(venv) / "linked folder").symlink_to(tmp_path)
    os.utime(package_folder(venv) / "packed.py", (1_000_000_000, 1_000_000_000))  # Python compares it with its .pyc
    copy = unpacked(venv, tmp_path)
    assert (copy / "bin" / "other").read_bytes() == (venv / "bin" / "other").read_bytes()
    assert str((package_folder(copy) / "linked").readlink()) == "packed.py"
    assert str((package_folder(copy) / "linked folder").readlink()) == str(tmp_path)
    assert (package_folder(copy) / "packed.py").stat().st_mtime == 1_000_000_000
    assert (copy / "bin" / "short").stat().st_mode & 0o111


def test_it_is_packed_again_only_after_a_change(venv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = venv_archive.path(venv, tmp_path)
    venv_archive.pack(venv, first, shared=False)
    said = capsys.readouterr().err
    assert said.startswith(f"Packing the environment {venv} (") and f"into {first}, once …\n" in said
    assert first.stat().st_mode & 0o777 == 0o600
    (package_folder(venv) / "__pycache__").mkdir()  # Python has imported something
    (package_folder(venv) / "__pycache__" / "packed.pyc").write_text("")
    assert venv_archive.path(venv, tmp_path) == first
    venv_archive.pack(venv, first, shared=False)
    assert capsys.readouterr().err == ""
    (package_folder(venv) / "packed.py").write_text("changed = True")
    assert venv_archive.path(venv, tmp_path) != first


def full_disk(*arguments: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_failure_leaves_nothing(venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirError, match=r"(?s)Not a directory: .*submit without --stage-env"):
        venv_archive.pack(venv, tmp_path / "file" / "archives" / "env.tar", shared=False)
    (tmp_path / "full").mkdir()
    with monkeypatch.context() as patched, pytest.raises(RunDirError, match="No space left on device"):
        patched.setattr(tarfile.TarFile, "add", full_disk)
        patched.setattr(tarfile.TarFile, "addfile", full_disk)
        venv_archive.pack(venv, tmp_path / "full" / "env.tar", shared=False)
    assert not [*(tmp_path / "full").iterdir()]
    (package_folder(venv) / "a socket").mkdir()
    os.mkfifo(package_folder(venv) / "pipe")  # is not waited for
    venv_archive.pack(venv, tmp_path / "env.tar", shared=True)
    assert (tmp_path / "env.tar").stat().st_mode & 0o777 == 0o640
    assert [path.name for path in tmp_path.iterdir() if "tmp" in path.name] == []


@needs_a_stranger
def test_what_somebody_else_could_have_packed_is_not_used(venv: Path) -> None:
    """In a folder of runs that others can write, a stranger puts an archive under the name of ours."""
    with folder_of_all(0o777) as runs:
        archive = venv_archive.path(venv, runs)
        planted = f"mkdir -p {archive.parent}; echo planted >{archive}; chmod -R a+rwX {archive.parent}"
        assert as_stranger("sh", "-c", planted).returncode == 0
        with pytest.raises(RunDirError, match=rf"belongs to user {STRANGER}, mode 0777.*would run as you"):
            venv_archive.pack(venv, archive, shared=False)
        assert archive.read_text() == "planted\n"
        assert as_stranger("sh", "-c", f"rm -r {archive.parent}; ln -s /usr {archive.parent}").returncode == 0
        with pytest.raises(RunDirError, match=rf"it is not a regular file, but lrwxrwxrwx of user {STRANGER}"):
            venv_archive.pack(venv, archive, shared=False)
        assert as_stranger("rm", archive.parent).returncode == 0
        venv_archive.pack(venv, archive, shared=False)
        venv_archive.pack(venv, archive, shared=False)  # is used again
        assert as_stranger("ls", archive.parent).returncode != 0
        archive.parent.chmod(0o777)
        with pytest.raises(RunDirError, match=r"may be written by others: user root \(0\), mode 0777"):
            venv_archive.pack(venv, archive, shared=False)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"container": "x.sif"}, "the job runs in a container, which is one file already."),
        ({"container_image": "x"}, "the job runs in a container, which is one file already."),
        (
            {"conda_env": "torch"},
            "torch is a conda environment, whose files contain its absolute path, so they can't be moved.",
        ),
        ({"venv": "/nowhere"}, "there is no pyvenv.cfg in it."),
    ],
)
def test_what_cannot_be_packed_is_refused(
    changes: dict[str, str], found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = dataclasses.replace(SPEC, **changes)  # type: ignore[arg-type]
    with pytest.raises(SpecError) as error:
        Plan(spec=spec, must_run=False)
    assert error.value.found.startswith(found)


def test_it_needs_a_virtual_environment() -> None:
    with pytest.raises(SpecError, match=r"(?s)the job uses no virtual environment, but .*python -m venv \.venv"):
        venv_archive.require(SPEC)


def test_only_slurm_has_nodes_to_unpack_on(monkeypatch: pytest.MonkeyPatch, venv: Path) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    with pytest.raises(SpecError, match=r"(?s)stage_env=True, and only Slurm supports environments that nodes unpack"):
        Plan(spec=dataclasses.replace(SPEC, venv=str(venv)), local=True)


def test_the_plan_names_the_archive_and_writes_nothing(
    venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = Plan(spec=dataclasses.replace(SPEC, venv=str(venv)), must_run=False)
    assert plan.venv_archive == venv_archive.path(venv, tmp_path / "runs")
    assert str(plan.venv_archive) in plan.script
    assert not (tmp_path / "runs").exists()
