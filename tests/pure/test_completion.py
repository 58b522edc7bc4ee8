"""`cluster-ddp completion`: what the shell then offers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from cluster_ddp.__main__ import VERBS
from cluster_ddp.cli import completion

OFFER = """source "$1"; shift; cd "$HERE"
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)); _shtab_cluster_ddp; echo "${COMPREPLY[@]}" """


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("it's bash") / "completion.bash"
    with pytest.MonkeyPatch.context() as patch, open(path, "w") as file:
        patch.setattr("sys.stdout", file)
        assert completion.main(["bash"]) == 0
    (path.parent / "runs").mkdir()
    return path


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ([""], [*VERBS]),
        (["submit", "--launcher", ""], ["srun", "fork"]),
        (["submit", "--req"], ["--requeue"]),
        (["submit", "--rest"], ["--restarts", "--restart-args"]),
        (["launch", "--launcher", ""], ["srun", "fork"]),
        (["launch", "--ran"], ["--ranks", "--ranks-per-node"]),
        (["submit", "--template", ""], ["completion.bash", "runs"]),
        (["train", "--amp", ""], ["off", "bf16", "fp16"]),
        (["train", "--no-cuda"], ["--no-cuda-graph", "--no-cuda"]),
        (["logs", ""], ["runs"]),
        (["sandbox", "d"], ["down"]),
    ],
)
def test_bash_offers_verbs_options_choices_and_files(script: Path, words: list[str], offered: list[str]) -> None:
    command = ["bash", "-c", OFFER, "bash", script, "cluster-ddp", *words]
    done = subprocess.run(command, env={"HERE": str(script.parent)}, capture_output=True, text=True)
    assert (sorted(done.stdout.split()), done.stderr) == (sorted(offered), "")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_takes_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert completion.main(["zsh"]) == 0
    done = subprocess.run(["zsh", "-n"], input=capsys.readouterr().out, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_shell_must_be_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        completion.main(["fish"])
    assert "'fish'" in capsys.readouterr().err
