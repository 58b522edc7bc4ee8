"""The command line of a submission: what it takes, what it refuses, what it costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from stand_ins import FakeSlurm, fake_slurm
from strangers import STRANGER, needs_a_stranger

import cluster_ddp
from cluster_ddp import JobSpec
from cluster_ddp.cli import submit as door
from cluster_ddp.errors import RunDirError, SpecError
from cluster_ddp.run import spec_file
from cluster_ddp.submission import resume
from cluster_ddp.submission.cli import options

__all__ = ["fake_slurm"]

TRAIN = ["python", "-m", "cluster_ddp.train"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_slurm: FakeSlurm) -> Path:
    path = tmp_path / "it's a folder"
    path.mkdir()
    monkeypatch.chdir(path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (path / "my_train.py").touch()
    return path


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        status = door.main(argv)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_reference_job_and_its_options(capsys, fake_slurm: FakeSlurm, folder: Path) -> None:
    argv = ("--nodes", "2", "--gpus-per-node", "2", "--no-check", "--epochs", "3", "--lr", "0.5", "--no-cuda")
    status, out, _ = run(capsys, *argv)
    run_dir = (folder / "runs/mnist-12").readlink()
    announced = f"Submitted job 12 (mnist): 2 nodes x 2 GPUs. Run directory: runs/{run_dir}\n"
    steps = "To follow it: cluster-ddp logs -f runs/mnist-12\nTo end it: cluster-ddp cancel runs/mnist-12\n"
    assert (status, out) == (0, announced + steps)
    record = json.loads((folder / "runs/mnist-12/spec.json").read_text())
    assert record["command"] == [*TRAIN, "--epochs", "3", "--lr", "0.5", "--no-cuda"]
    assert "# Each task runs: python -m cluster_ddp.train --epochs 3 --lr 0.5 --no-cuda\n" in fake_slurm.stdin("sbatch")


@pytest.mark.parametrize(
    "option",
    [("--container-image", "x"), ("--launcher", "fork"), ("--restart-args", "--resume x")],
)
def test_the_reference_job_takes_the_options_of_any_command(capsys, option: tuple[str, str]) -> None:
    _, out, err = run(capsys, "--dry-run", *option, "--lr", "0.5")
    assert ' -- python -m cluster_ddp.train --lr 0.5 "$@"\n' in out, err


def test_without_an_environment_the_reference_job_has_this_python(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    _, out, err = run(capsys, "--dry-run", "--lr", "0.5")
    assert f' -- {sys.executable} -m cluster_ddp.train --lr 0.5 "$@"\n' in out, err


def test_a_dry_run_of_a_command_shows_it_behind_the_agent(capsys) -> None:
    _, out, _ = run(capsys, "--dry-run", "--", "python", "my_train.py", "--lr", "0.1")
    started = out[out.index('\nexec "$python" -I -S "$agent" job ') :]
    assert started.endswith(' \\\n  -- python my_train.py --lr 0.1 "$@"\n')
    assert "submitit" not in out and sys.executable not in started


def test_what_resumes_repeats_the_job_with_what_is_given_changed(
    capsys, monkeypatch, fake_slurm: FakeSlurm, folder: Path
) -> None:
    fake_slurm.command("scontrol", "echo 'JobId=12 JobName=x JobState=FAILED Reason=None ExitCode=1:0'")
    run(capsys, "--no-check", "--nodes", "2", "--mem", "8G", "--epochs", "3", "--no-cuda")
    elsewhere = folder / "else where"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    fake_slurm.command("sbatch", "echo 13")
    more = ("--runs-dir", "../runs", "--no-check", "--mem", "16G", "--epochs", "5")
    status, out, err = run(capsys, "--resume", "12", *more)
    assert status == 0, err
    run_dir = (folder / "runs/mnist-12").readlink()
    assert (folder / "runs/mnist-13").readlink() == run_dir, "the run of both"
    announced = f"Submitted job 13 (mnist): 2 nodes x 1 GPU. Run directory: ../runs/{run_dir}\nTo follow it: "
    assert out.startswith(announced)
    assert "cancel ../runs/mnist-13\n" in out
    record = json.loads((folder / "runs/mnist-12/spec.json").read_text())
    assert record["command"] == [*TRAIN, "--epochs", "3", "--no-cuda", "--epochs", "5"]
    assert (record["spec"]["mem"], record["folder"]) == ("16G", str(folder))
    assert spec_file.read(folder / "runs/mnist-13")["job"] == "13"
    assert {"spec.json", "job.json", "job.sbatch", "agent.pyz"} == {
        path.name for path in (folder / "runs/mnist-12/job-12").iterdir()
    }
    run(capsys, "--no-check", "--name", "own", "--", "python", "my_train.py")
    fake_slurm.command("sbatch", "echo 14")
    status, _, err = run(capsys, "--resume", str(folder / "runs/own-13"), "--lr", "1")
    assert status == 2
    assert err.rstrip().endswith("-- python my_train.py --lr 1")


def test_what_resumes_has_the_words_for_later_starts_from_its_first_start_on(
    capsys, fake_slurm: FakeSlurm, folder: Path
) -> None:
    more = ("--restart-args", "--resume 'o o/last'")
    assert run(capsys, "--no-check", "--name", "x", *more, "--", "python", "my_train.py")[0] == 0
    script, path = folder / "runs/x-12/job.sbatch", folder / "runs/x-12/spec.json"
    assert "  '--restart-args=--resume '\"'\"'o o/last'\"'\"'' \\\n" in script.read_text()
    assert script.read_text().endswith('  -- python my_train.py "$@"\n')
    for job in (12, 13):
        fake_slurm.command("scontrol", f"echo 'JobId={job} JobName=x JobState=FAILED Reason=None ExitCode=1:0'")
        fake_slurm.command("sbatch", f"echo {job + 1}")
        assert run(capsys, "--no-check", "--resume", "runs/x-12")[0] == 0
        assert script.read_text().endswith(" -- python my_train.py --resume 'o o/last' \"$@\"\n")
        assert "--restart-args" not in script.read_text()
        assert json.loads(path.read_text())["spec"]["restart_args"] == "--resume 'o o/last'"


def test_what_is_submitted_has_the_price_of_its_spare_nodes(capsys, folder: Path) -> None:
    words = ("--nodes", "2", "--gpus-per-node", "4", "--restarts", "3", "--spare-nodes", "1")
    _, out, _ = run(capsys, "--no-check", *words, "--", "true")
    assert out.startswith(
        "Submitted job 12 (true): 2 nodes x 4 GPUs, and 1 spare node of 3: its 4 GPUs wait idle. Run "
    )


def no_entry(*_: object) -> bool:
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize(("where", "name", "answer"), [(os, "access", lambda *_: False), (Path, "is_dir", no_entry)])
def test_a_folder_one_may_not_enter_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: object, name: str, answer: object
) -> None:
    """As root, all may be entered."""
    monkeypatch.setattr(where, name, answer)
    with pytest.raises(RunDirError, match="you may not enter this folder"):
        resume.find(tmp_path, tmp_path)


def test_of_several_runs_with_one_id_the_newest_is_resumed(capsys, fake_slurm: FakeSlurm, folder: Path) -> None:
    """As after two clusters with one file system, or a sandbox that was made anew. Last jobs count before others."""
    paths = [folder / "runs" / f"{name}-12" for name in ("m", "a", "z")]
    for path in paths:
        run(capsys, "--no-check", "--name", path.name[0], "--", "true")
        (path / "job-7").mkdir()
    for at, path in enumerate(paths, start=1):
        record = json.loads((path / "spec.json").read_text())
        (path / "spec.json").write_text(json.dumps({**record, "submitted": record["submitted"] + at * 60}))
        os.utime(path / "job-7", (2e9 + at, 2e9 + at))
        assert resume.find("12", folder / "runs").run_dir == path.resolve()
        assert resume.find("7", folder / "runs").run_dir == path.resolve()
        (folder / "runs" / f"other-{at}" / "job-12").mkdir(parents=True)


@needs_a_stranger
def test_nothing_is_resumed_in_a_folder_of_somebody_else(capsys, fake_slurm: FakeSlurm, folder: Path) -> None:
    """The job would run a script, and write a log through a link, that they can put there."""
    theirs = folder / "runs" / "theirs"
    (theirs / "job-12").mkdir(parents=True)
    os.chown(theirs, STRANGER, STRANGER)
    for word in (str(theirs), "12"):
        status, _, err = run(capsys, "--no-check", "--resume", word, "--", "true")
        assert (status, f"belongs to user {STRANGER}, mode 0755. Its content" in err) == (2, True), err
    assert fake_slurm.calls("sbatch") == []


def test_a_command_of_ones_own(capsys, fake_slurm: FakeSlurm, folder: Path) -> None:
    status, out, _ = run(capsys, "--no-check", "--", "python", "my_train.py", "--", "--nodes", "9")
    assert status == 0
    run_dir = (folder / "runs/my_train-12").readlink()
    assert out.startswith(f"Submitted job 12 (my_train): 1 node x 1 GPU. Run directory: runs/{run_dir}\n")
    assert json.loads((folder / "runs/my_train-12/spec.json").read_text())["command"][2:] == ["--", "--nodes", "9"]


def test_a_grid_over_the_reference_job(capsys, folder: Path) -> None:
    status, out, err = run(
        capsys, "--no-check", "--array", "seed=1..3", "lr=0.1,1.0%2", "--seed", "{seed}", "--lr", "{lr}"
    )
    assert status == 0, err
    first = f"{(folder / 'runs/mnist-12').readlink()}/0"
    assert out.startswith(f"Submitted array 12 (mnist): 6 tasks, each 1 node x 1 GPU. Run directories: runs/{first} … ")


def test_a_dry_run_submits_nothing(capsys, fake_slurm: FakeSlurm, folder: Path) -> None:
    status, out, _ = run(capsys, "--nodes", "2", "--dry-run", "--", "python", "my_train.py", "a\n#SBATCH --nodes=9")
    assert status == 0
    assert "#SBATCH --nodes=2" in out
    options = out[: out.index("\nset -eo pipefail")].splitlines()  # sbatch reads none after the first command
    assert [line for line in options if line.startswith("#SBATCH --nodes")] == ["#SBATCH --nodes=2"]
    assert fake_slurm.calls("sbatch") == []
    assert not (folder / "runs").exists()


BAD: list[tuple[tuple[str, ...], str]] = [
    (("--nodes", "0"), "nodes must be a whole number of 1 or more"),
    (("--gpus-per-node", "-1"), "gpus_per_node must be"),
    (("--nodes", "two"), "or a range of them, MIN-MAX, such as 2-8"),
    (("--time", "1h"), "time must be 30 (minutes)"),
    (("--time", "0"), "longer than 0"),
    (("--mem", "32GB"), "mem must be a size such as 32G"),
    (("--name", "a b"), "name must be"),
    (("--name", "$(touch pwned)"), "name must be"),
    (("--name", "a\nb"), "name must be"),
    (("--partition", "a;b"), "partition must be"),
    (("--account", "`x`"), "account must be"),
    (("--launcher", "mpirun"), "launcher must be one of srun, fork"),
    (("--launcher", "fork", "--", "bash", "train.sh"), "--launcher srun, which runs any command"),
    (("--array", "seed="), "an empty value"),
    (("--array", "seed=3..1"), "the range 3..1 is empty"),
    (("--array", "seed=0..3"), "the command has no {seed}, so"),
    (("--array", "x=1,2", "--", "echo", "{x}", "{y}"), "A command with {y}:"),
    (("--seed", "{array_task_id}"), "without {array_task_id} unless array is set"),
    (("--array",), "--array expected at least one argument"),
    (("--array", "5-2"), "array must be"),
    (("--", "no_such_program"), "there is no such program here"),
    (("--", "python", "no_such_script.py"), "there is no such file in"),
    (("--", "my_train.py"), "-- python SCRIPT"),
    (("--",), "there is nothing to run"),
    (("python", "my_train.py"), "a command comes after two dashes"),
    (("--epochs", "0"), "epochs must be"),
    (("--array", "epochs=0,1", "--epochs", "{epochs}"), "epochs must be"),  # in its first task
    (("--nodes", "1"), "train-images-idx3-ubyte is missing"),
    (("--data-dir", "else where"), 'torchvision.datasets.MNIST("else where", download=True)'),
    (("--epoch", "3", "--", "python", "my_train.py"), "there is no option --epoch"),
    (("--node", "3", "--", "python", "my_train.py"), "Did you mean --nodes?"),
    (("--venv", "no/such", "--", "true"), "there is no such folder"),
    (("--conda-env", "x", "--", "true"), "there is no conda on the PATH"),
    (("--container", "no.sif", "--", "true"), "there is no such file"),
    (("--profile", "x"), "there is no cluster.toml"),
    (("-G", "2"), "use --gpus-per-node (and --gpu-type)"),
    (("--ntasks", "3"), "one task drives 1 GPU, so it is 1 here."),
    (
        ("--gpus-per-node", "4", "--gpus-per-task", "3", "--", "true"),
        "gpus_per_task must be a divisor of gpus_per_node=4",
    ),
    (
        ("--gpus-per-node", "4", "--gpus-per-task", "2", "--ntasks-per-node", "4", "--", "true"),
        "one task drives 2 GPUs, so it is 2 here.",
    ),
    (("--spare-nodes", "1", "--", "true"), "spare_nodes must be left out without restarts"),
    (("--max-mem", "64G", "--", "true"), "max_mem must be left out without restarts"),
    (("--restarts", "1", "--max-mem", "64G", "--no-requeue", "--", "true"), "left out without a requeue"),
    (
        ("--local", "--restarts", "1", "--mem", "32G", "--max-mem", "64G", "--", "true"),
        "only Slurm supports more memory after a requeue",
    ),
    (("--hang-restart-s", "9", "--", "true"), "hang_restart_s must be left out without restarts"),
    (("--local", "--restarts", "1", "--spare-nodes", "1", "--", "true"), "only Slurm supports spare nodes"),
    (("--restart-args", "--resume 'o", "--", "true"), "words that a shell could split: no closing quotation"),
    (("--runs-dir", "a%j", "--", "true"), "which Slurm interprets"),
    (("--snapshot",), "not a git repository"),
    (("--local", "--nodes", "2"), "it asks for 2 nodes, but this machine is one node"),
    (("--local", "--nodes", "2"), "with --no-local"),
    (("--local", "--test-only", "--", "true"), "this machine has none"),
    (("--sbatch-options=--wait", "--", "true"), "sbatch_options must be"),
    (("--array", "0-99999999", "--", "true"), "of at most 4,000,000 tasks"),
    (("--resume", "12"), "runs has no job 12 of cluster-ddp submit"),
    (("--resume", "never"), "-- python -m cluster_ddp.train --resume never"),
    (("--resume", "."), "so no submission has made it"),
    (("--resume", ".", "--run-dir", "x"), "--run-dir not allowed with argument --resume"),
    (("--resume", ".", "--snapshot", "--", "true"), "leave the snapshot out"),
    (("--run-dir", ".", "--", "true"), "resume its run: --resume"),
]


@pytest.mark.parametrize(("argv", "words"), BAD, ids=[" ".join(argv)[:40] for argv, _ in BAD])
def test_bad_input_is_one_block_and_leaves_nothing(
    capsys, monkeypatch, fake_slurm: FakeSlurm, folder: Path, argv: tuple[str, ...], words: str
) -> None:
    monkeypatch.setenv("PATH", f"{fake_slurm.folder}:/usr/bin:/bin:{Path(sys.executable).parent}")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", "/")
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert words in err
    assert "Traceback" not in err
    assert fake_slurm.calls("sbatch") == []
    assert sorted(path.name for path in folder.rglob("*")) == ["my_train.py"]
    assert err.startswith(("cluster-ddp submit: error: ", "warning: "))
    assert len([line for line in err.splitlines() if not line.startswith("warning: ")]) <= 4
    assert "  Hint: " in err


def test_settings_come_from_files_and_the_command_line_wins(capsys, folder: Path) -> None:
    (folder / "cluster.toml").write_text('partition = "gpu"\nnodes = 3\ntime = 30\n[long]\ntime = "2-00"\n')
    _, out, _ = run(capsys, "--profile", "long", "--nodes", "2", "--no-check", "--dry-run", "--", "true")
    assert {"#SBATCH --partition=gpu", "#SBATCH --nodes=2", "#SBATCH --time=2-00:00:00"} <= set(out.splitlines())


def test_show_config_tells_where_each_setting_comes_from(capsys, folder: Path) -> None:
    (folder / "cluster.toml").write_text('partition = "gpu"\nnodes = 3\n[long]\ntime = "2-00"\n')
    status, out, _ = run(capsys, "--profile", "long", "--nodes", "3", "--show-config")
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in out.splitlines()}
    assert status == 0
    assert rows["nodes"] == ["3", "command line"]
    assert rows["partition"] == ["gpu", str(folder / "cluster.toml")]
    assert rows["time"] == ["2-00", f"{folder / 'cluster.toml'} [long]"]
    assert rows["gpus_per_node"] == ["1", "default"]
    assert rows["runs_dir"] == ["runs", "default"]


def test_a_file_that_others_may_write_is_used_once_it_is_accepted(capsys, folder: Path) -> None:
    settings = folder / "cluster.toml"
    settings.write_text('setup = ["module load cuda"]\n')
    settings.chmod(0o666)
    dry = ("--no-check", "--dry-run", "--", "true")
    status, out, err = run(capsys, *dry)
    assert (status, out) == (2, "")
    assert f"Reading the settings in {settings}:\n  {settings} may be written by others: user " in err
    assert ", mode 0666. Its settings and setup lines would run as you." in err
    for words in (("--accept", "cluster-toml"), ()):
        status, out, err = run(capsys, *words, *dry)
        assert (status, err) == (0, "")
        assert "\nmodule load cuda\n" in out
    settings.write_text('setup = ["curl x | sh"]\n')
    assert run(capsys, *dry)[0] == 2


def test_a_profile_that_is_not_toml(capsys, folder: Path) -> None:
    (folder / "cluster.toml").write_text("partition: gpu\n")
    status, _, err = run(capsys, "--", "true")
    assert status == 2
    assert "it is not TOML" in err


def test_needless_tasks_are_advised_against(capsys) -> None:
    argv = ("--gpus-per-node", "2", "--ntasks", "2", "--dry-run", "--", "true")
    _, _, err = run(capsys, *argv)
    assert "the tasks follow from the GPUs" in err
    assert "(silence: --accept ntasks)" in err
    _, _, err = run(capsys, "--accept", "ntasks", "node-local-path", "cluster", *argv)
    assert err == ""


@pytest.mark.parametrize(
    ("sbatchs", "ours"),
    [
        ("-J fit -N 2-4", "--name fit --nodes 2-4"),
        ("--job-name=fit -N2", "--name fit --nodes 2"),
        ("-c 4 -t 2:00:00 -p gpu", "--cpus-per-task 4 --time 2:00:00 --partition gpu"),
        ("-A me -q high -C a100 -x node3", "--account me --qos high --constraint a100 --exclude node3"),
        ("-d afterany:12", "--after afterany:12"),
        ("--dependency=afterok:12", "--after afterok:12"),
        ("-a 0-7%4", "--array 0-7%4"),
        ("--gres=gpu:2", "--gpus-per-node 2"),
        ("--gres gpu", "--gpus-per-node 1"),
        ("--gres gpu:a100:2", "--gpus-per-node 2 --gpu-type a100"),
        ("--gres gpu:a100", "--gpus-per-node 1 --gpu-type a100"),
        ("-n 2 --gres=gpu:2", "--ntasks 2 --gpus-per-node 2"),
    ],
)
def test_sbatchs_own_names_mean_the_same(capsys, fake_slurm: FakeSlurm, folder: Path, sbatchs: str, ours: str) -> None:
    shown = []
    for words in (sbatchs, ours):
        status, out, err = run(capsys, *words.split(), "--no-check", "--dry-run", "--", "true")
        assert status == 0, err
        shown.append([line for line in out.splitlines() if line.startswith("#SBATCH")])
    assert shown[0] == shown[1] != []


def test_a_launcher_in_the_command_is_refused_unless_it_is_meant(capsys, fake_slurm: FakeSlurm, folder: Path) -> None:
    (folder / "t.py").touch()
    fake_slurm.command("torchrun", "true")
    argv = ("--gpus-per-node", "2", "--dry-run", "--", "torchrun", "t.py")
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert "-- COMMAND (such as python SCRIPT), without torchrun and its options; to submit it anyway" in err
    status, out, _ = run(capsys, "--accept", "nested", *argv)
    assert status == 0
    assert "torchrun t.py" in out


def test_options_of_sbatch_in_the_environment_are_told_of(capsys, monkeypatch) -> None:
    monkeypatch.setenv("SBATCH_ACCOUNT", "me")
    _, _, err = run(capsys, "--dry-run", "--", "true")
    assert "SBATCH_ACCOUNT=me in your environment is ignored" in err


def test_a_module_that_is_not_there(capsys, monkeypatch, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".bash_profile").write_text("module() { echo \"Unable to locate a modulefile for '$2'\" >&2; return 1; }\n")
    monkeypatch.setenv("HOME", str(home))
    status, _, err = run(capsys, "--modules", "cuda/99", "--", "true")
    assert status == 2
    assert "Unable to locate a modulefile for 'cuda/99'" in err


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (("--setup", "export WANDB_API_KEY=0123456789abcdef", "--", "true"), "WANDB_API_KEY in --setup"),
        (("--", "true", "--hf-token", "hf_abcdefghijklmnopqrst"), "hf-token in the command, hf_… in the command"),
        (("--", "env", "PASSWORD=correct-horse", "true"), "PASSWORD in the command"),
        (("--array", "key=sk-0123456789abcdefghij,b", "--", "true", "{key}"), "sk-… in the command"),
    ],
)
def test_what_looks_like_a_secret_is_told_of_but_not_told(capsys, argv: tuple[str, ...], name: str) -> None:
    _, _, err = run(capsys, "--dry-run", *argv)
    assert f"The job seems to contain a secret: {name}. " in err
    assert "(silence: --accept secret)" in err
    assert not any(secret in err for secret in ("0123456789", "abcdefghij", "horse"))


@pytest.mark.parametrize(
    "words",
    [
        ("--max-tokens", "100000000"),
        ("--tokenizer=bert-base-uncased",),
        ("--pad_token", "[PAD]"),
        ("sh", "-c", "HF_TOKEN=$(cat ~/.token) exec train"),
    ],
)
def test_what_is_no_secret(capsys, words: tuple[str, ...]) -> None:
    _, _, err = run(capsys, "--dry-run", "--", "true", *words)
    assert "looks like a secret" not in err


def test_the_clusters_limit_on_arrays(capsys, fake_slurm: FakeSlurm) -> None:
    fake_slurm.command("sinfo", "true")
    fake_slurm.command("scontrol", "echo 'MaxArraySize            = 1001'")
    status, _, err = run(capsys, "--array", "0-1001", "--", "true")
    assert status == 2
    assert "the highest task number on this cluster is 1000 (MaxArraySize = 1001)" in err
    assert fake_slurm.calls("sbatch") == []


def test_an_exported_run_directory_is_told_of(capsys, monkeypatch) -> None:
    monkeypatch.setenv("CLUSTER_DDP_RUN_DIR", "runs/mine")
    _, _, err = run(capsys, "--dry-run", "--", "true")
    assert "CLUSTER_DDP_RUN_DIR=runs/mine in your environment is ignored. Use --run-dir" in err


def test_a_conda_environment_is_looked_up(capsys, fake_slurm: FakeSlurm) -> None:
    fake_slurm.command(
        "conda", "printf '# conda environments:\\nbase  *  /opt/conda\\nmine     /opt/conda/envs/mine\\n'"
    )
    status, _, err = run(capsys, "--conda-env", "yours", "--", "true")
    assert status == 2
    assert "conda env list shows: /opt/conda, /opt/conda/envs/mine, base, mine" in err
    status, out, err = run(capsys, "--conda-env", "mine", "--dry-run", "--", "true")
    assert status == 0, err
    assert "conda activate mine" in out


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "my train.py"], "my_train"),
        (["python3.12", "-u", "sub/train.py", "--x"], "train"),
        (["python", "-m", "pkg.train"], "pkg.train"),
        (["./run-it.sh"], "run-it"),
        (["bash", "-c", "x"], "bash"),
        (["bash", "run.sh"], "run"),
        (["env", "A=1", "/bin/sh", "-eu", "sub/my run.sh", "x"], "my_run"),
        (["bash", "-eo", "pipefail", "--", "run.sh"], "run"),
        (["bash", "-lc", "run.sh"], "bash"),
        (["bash", "--rcfile", "x", "run.sh"], "run"),
        (["zsh"], "zsh"),
        (["env", "A=1", "python", "-W", "ignore", "train.py"], "train"),
        (["python", "-c", "import x"], "python"),
        (["größe"], "größe"),
        (["$(x)"], "__x_"),
    ],
)
def test_a_job_is_named_after_what_it_runs(command: list[str], name: str) -> None:
    assert options.job_name(command) == name
    JobSpec(name=name, command=("true",))


def test_from_python(fake_slurm: FakeSlurm, folder: Path) -> None:
    job = cluster_ddp.submit(JobSpec(name="fit"), ["true"], check=False)
    assert job.run_dir == (folder / "runs" / "fit-12").resolve()
    with pytest.raises(SpecError, match=r"submit_array\(spec"):
        cluster_ddp.submit(JobSpec(name="fit", array="0-1"), ["true"], check=False)
    with pytest.raises(SpecError, match="neither grid nor array"):
        cluster_ddp.submit_array(JobSpec(name="fit"), ["true"], check=False)
    tasks = cluster_ddp.submit_array(JobSpec(name="many", array="0-1"), ["true"], check=False)
    assert [task.id for task in tasks] == ["12_0", "12_1"]
    with pytest.raises(SpecError, match="give its words"):
        cluster_ddp.submit(JobSpec(name="fit"), "python x.py", check=False)


def test_from_a_fresh_interpreter(fake_slurm: FakeSlurm) -> None:
    code = "import cluster_ddp; print(cluster_ddp.submit(cluster_ddp.JobSpec(name='x'), ['true'], check=False).id)"
    root = str(Path(__file__).parents[4])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": root}
    )
    assert done.stdout == "12\n", done.stderr
