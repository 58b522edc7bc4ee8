"""The examples run as their first lines say, alone and on two ranks, and resume as if they had not been stopped."""

from __future__ import annotations

import ast
import difflib
import functools
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from idx_writer import idx
from ranks import TORCHRUN, Outcome, job_ids, run_ranks, slurm_step
from slowness import LIMIT_S, scaled

import cluster_ddp
from cluster_ddp.mnist.data import IDX_FILES, raw_folder

pytestmark = pytest.mark.full

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
JOB_ID = job_ids()
LINES = {
    **{"mnist_ddp_plain.py": 150, "convnet.py": 130},
    **{"gpt_fsdp.py": 150, "webdataset_stream.py": 130},
}


def run_example(script: Path, arguments: tuple[str, ...], stop_at: int | None, workers: int | None = None) -> None:
    """In a rank: run a script as `python SCRIPT` would. The first start gets USR1 after so many steps.

    Args:
        script: its path.
        arguments: of its command line.
        stop_at: number of steps; None for all.
        workers: of each DataLoader; None as the script has it.
    """
    if stop_at is not None:
        step = cluster_ddp.Checkpointer.step

        def stopped(self: cluster_ddp.Checkpointer) -> None:
            if self.steps == stop_at:
                os.kill(os.getpid(), signal.SIGUSR1)
            step(self)

        cluster_ddp.Checkpointer.step = stopped  # type: ignore[method-assign]
    if workers is not None:
        shard = cluster_ddp.World.shard

        def with_workers(self: cluster_ddp.World, *args: Any, **options: Any) -> cluster_ddp.Shard:
            return shard(self, *args, **{**options, "num_workers": workers})

        cluster_ddp.World.shard = with_workers  # type: ignore[method-assign]
    os.chdir(Path(os.environ["CLUSTER_DDP_RUN_DIR"]).parent)  # there is no MNIST
    multiprocessing.set_start_method("fork", force=True)  # as for a script; the forkserver's children would use that
    sys.argv = [script.name, *arguments]
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(str(script), run_name="__main__")


def run(
    folder: Path,
    *arguments: str,
    name: str | Path,
    ranks: int,
    stop_at: int | None = None,
    restarts: int = 0,
    workers: int | None = None,
) -> list[Outcome]:
    folder.mkdir(exist_ok=True)
    env = {"CLUSTER_DDP_RUN_DIR": str(folder / "run"), "SLURM_RESTART_COUNT": str(restarts)}
    if name == "two_device_model.py":
        env |= {"CLUSTER_DDP_GPUS_PER_TASK": "2", "SLURM_GPUS_ON_NODE": str(2 * ranks), "CLUSTER_DDP_DUMMY_GPUS": "1"}
    environments = [slurm_step(rank, ranks, job_id=JOB_ID + ranks, **env) for rank in range(ranks)]
    return run_ranks(functools.partial(run_example, EXAMPLES / name, arguments, stop_at, workers), environments, folder)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hello_ddp.py", "The sum of all ranks is"),
        ("collectives.py", "ranks: all results are right."),
        ("ddp_from_scratch.py", "gradients equal DDP's"),
        ("checkpoint_by_hand.py", "ranks have the same weights as before."),
    ],
)
def test_it_does_what_it_says(tmp_path: Path, name: str, words: str, ranks: int) -> None:
    ends = run(tmp_path, name=name, ranks=ranks)
    assert [end.exit_code for end in ends] == [0] * ranks, ends
    assert [words in end.output for end in ends] == [True, False][:ranks]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("mnist_ddp.py", ("--epochs", "4")),
        ("convnet.py", ("--epochs", "6", "--log-interval", "5")),
        ("two_device_model.py", ()),
    ],
)
def test_a_stopped_training_prints_what_an_undisturbed_one_does(
    tmp_path: Path, name: str, arguments: tuple[str, ...], ranks: int
) -> None:
    whole = run(tmp_path / "whole", *arguments, name=name, ranks=ranks)
    assert [end.exit_code for end in whole] == [0] * ranks, whole
    begun = run(tmp_path / "stopped", *arguments, name=name, ranks=ranks, stop_at=5)
    assert [end.exit_code for end in begun] == [75] * ranks, begun
    (tmp_path / "stopped" / "rank0.log").rename(tmp_path / "before")
    ended = run(tmp_path / "stopped", *arguments, name=name, ranks=ranks, restarts=1)
    assert [end.exit_code for end in ended] == [0] * ranks, ended
    assert figures(begun[0]) + figures(ended[0]) == figures(whole[0]) != []


class AtTopLevel(ast.NodeTransformer):
    """Puts the bodies of `main` and `train` where they are called."""

    def __init__(self, module: ast.Module) -> None:
        self.bodies = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}

    def visit_Expr(self, node: ast.Expr) -> ast.AST | list[ast.stmt]:
        call = node.value
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ("main", "train")):
            return node
        function = self.bodies[call.func.id]
        given = [
            ast.Assign([ast.Name(argument.arg, ast.Store())], value)
            for argument, value in zip(function.args.args, call.args)
        ]
        body = ast.Module([*given, *function.body[1:]], [])  # without the docstring
        return self.visit(body).body


def in_form(script: Path, form: str) -> str:
    """The text of a script with all its code in a function, or with its training at top level."""
    text = script.read_text()
    if form == "function":
        return f"def everything():\n{textwrap.indent(text, '    ')}\neverything()\n"
    module = ast.parse(text)
    return ast.unparse(ast.fix_missing_locations(AtTopLevel(module).visit(module)))


RESNET = ("--samples", "8", "--batch-size", "2", "--epochs", "1")  # four steps on one rank
RESNET_OF_TWO = ("--samples", "32", *RESNET[2:])  # eight: two ranks may agree on the stop a step later


@pytest.mark.parametrize(
    ("name", "arguments", "form", "workers", "ranks"),
    [
        ("mnist_ddp.py", ("--epochs", "1"), "function", 2, 1),
        ("mnist_ddp.py", ("--epochs", "3"), "function", 2, 2),
        ("convnet.py", ("--epochs", "3", "--log-interval", "4"), "top level", 2, 2),
        ("char_lm.py", ("--epochs", "2"), "function", 0, 1),
        ("char_lm.py", ("--epochs", "3"), "top level", 2, 2),
        ("resnet_cifar.py", RESNET_OF_TWO, "top level", 2, 2),
        ("resnet_cifar.py", RESNET, "function", 0, 1),
    ],
)
def test_a_training_resumes_exactly_in_either_form_with_and_without_workers(
    tmp_path: Path, name: str, arguments: tuple[str, ...], form: str, workers: int, ranks: int
) -> None:
    (script := tmp_path / name).write_text(in_form(EXAMPLES / name, form))
    start = functools.partial(run, name=script, ranks=ranks, workers=workers)
    whole, begun = start(tmp_path / "whole", *arguments), start(tmp_path / "stopped", *arguments, stop_at=3)
    assert [end.exit_code for end in (*whole, *begun)] == [0] * ranks + [75] * ranks, (whole, begun)
    ended = start(tmp_path / "stopped", *arguments, restarts=1)  # appends to the same log
    assert [end.exit_code for end in ended] == [0] * ranks, ended
    assert figures(ended[0]) == figures(whole[0]) != []
    assert "Resuming from" in ended[0].output
    weights, resumed = (last_model(tmp_path / folder / "run") for folder in ("whole", "stopped"))
    assert weights.keys() == resumed.keys()
    assert all(torch.equal(weights[key], resumed[key]) for key in weights)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sharded_training_resumes_exactly(tmp_path: Path, ranks: int) -> None:
    """With dropout, AdamW and clipping; the last line is a digest of the weights."""

    def start(folder: str, **more: Any) -> list[Outcome]:
        return run(tmp_path / folder, "--epochs", "2", "--layers", "2", name="gpt_fsdp.py", ranks=ranks, **more)

    whole, begun = start("whole"), start("stopped", stop_at=5)
    assert [end.exit_code for end in (*whole, *begun)] == [0] * ranks + [75] * ranks, (whole, begun)
    ended = start("stopped", restarts=1)  # appends to the same log
    assert [end.exit_code for end in ended] == [0] * ranks, ended
    assert "Resuming from" in ended[0].output
    told, resumed = (re.findall(r"^epoch.*|^weights: .*", end.output, re.MULTILINE) for end in (whole[0], ended[0]))
    assert told == resumed and len(told) == 3


def test_a_training_that_changes_its_number_of_ranks_prints_the_same_losses(tmp_path: Path) -> None:
    """Stopped amid an epoch on 2 ranks, continued on 3."""

    def start(folder: str, **more: Any) -> list[Outcome]:
        return run(tmp_path / folder, "--epochs", "3", "--samples", "1600", name="any_number_of_ranks.py", **more)

    whole, begun = start("whole", ranks=1), start("moved", ranks=2, stop_at=5)
    assert [end.exit_code for end in (*whole, *begun)] == [0, 75, 75], (whole, begun)
    ended = start("moved", ranks=3, restarts=1)
    assert [end.exit_code for end in ended] == [0] * 3, ended
    expected, found = (
        re.findall(r"^epoch \d: loss ([\d.]+)", end.output, re.MULTILINE) for end in (whole[0], ended[0])
    )
    assert len(expected) == 3 and "3 ranks instead of 2" in ended[0].output
    assert [float(loss) for loss in found] == pytest.approx([float(loss) for loss in expected], abs=2e-5)


def run_killed(script: Path, arguments: tuple[str, ...], kill_at: int) -> None:
    """In a rank: run a script, and end it by SIGKILL after so many steps, once the checkpoint before is written."""
    step = cluster_ddp.Checkpointer.step

    def killed(self: cluster_ddp.Checkpointer) -> None:
        if self.steps == kill_at:
            self._folder.writer.wait()
            self.world.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        step(self)

    cluster_ddp.Checkpointer.step = killed  # type: ignore[method-assign]
    run_example(script, arguments, None)


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 2)])
def test_a_stream_that_was_killed_in_a_tar_file_ends_with_the_same_weights(
    tmp_path: Path, ranks: int, workers: int
) -> None:
    arguments = ("--data", str(tmp_path / "tars"), "--epochs", "2", "--workers", str(workers))
    whole = run(tmp_path / "whole", *arguments, name="webdataset_stream.py", ranks=ranks)
    assert [end.exit_code for end in whole] == [0] * ranks, whole
    (folder := tmp_path / "killed").mkdir()
    env = {"CLUSTER_DDP_RUN_DIR": str(folder / "run")}
    killed = functools.partial(run_killed, EXAMPLES / "webdataset_stream.py", arguments, 130 // ranks)
    environments = [slurm_step(rank, ranks, job_id=JOB_ID + ranks, **env) for rank in range(ranks)]
    ends = run_ranks(killed, environments, folder)
    assert [end.exit_code for end in ends] == [-signal.SIGKILL] * ranks, ends
    ended = run(folder, *arguments, name="webdataset_stream.py", ranks=ranks, restarts=1)
    assert [end.exit_code for end in ended] == [0] * ranks, ended
    assert re.search(r"Resuming from .*, epoch \d, \d+ (of its 960 )?samples seen", ended[0].output), ended[0].output
    last = [re.findall(r"^(epoch 2.*|weights .*)", end.output, re.MULTILINE) for end in (whole[0], ended[0])]
    assert last[0] == last[1] and len(last[0]) == 2


def last_model(run_dir: Path) -> dict[str, torch.Tensor]:
    newest = max(run_dir.glob("checkpoints/step-*.pt"))
    model: dict[str, torch.Tensor] = torch.load(newest, weights_only=True)["parts"]["model"]
    return model


def figures(end: Outcome) -> list[str]:
    return re.findall(r"^(?:epoch|best|Test set).*?(?:ccuracy|validation loss):? [\d.]+", end.output, re.MULTILINE)


def test_a_whole_training_learns_as_the_plain_one_does_from_which_it_is_ported(tmp_path: Path) -> None:
    """The page shows both: its diff, applied backwards, makes the plain script."""
    ported = EXAMPLES / "char_lm.py"
    shown = (EXAMPLES.parent / "docs" / "how-to" / "whole-training.md").read_text()
    text = ported.read_text()
    for hunk in re.split(r"^@@.*\n", shown.partition("```diff\n")[2].partition("```")[0], flags=re.MULTILINE):
        before, after = ("".join(f"{line[1:]}\n" for line in hunk.splitlines() if line[:1] != sign) for sign in "+-")
        assert after in text
        text = text.replace(after, before)
    assert "cluster_ddp" not in text.partition('"""\n\nimport')[2]
    (plain := tmp_path / "plain.py").write_text(text.replace('"best.pt"', repr(str(tmp_path / "best.pt"))))
    last = []
    for script in (plain, ported):
        (end,) = run(tmp_path / script.stem, "--epochs", "2", name=script, ranks=1)
        assert end.exit_code == 0, end.output
        first, second = (float(line.split()[-1]) for line in figures(end))
        assert second < 0.9 * first
        last.append(second)
    assert (tmp_path / "best.pt").exists()
    assert last[0] == pytest.approx(last[1], rel=0.1)  # the batches come in another order


@pytest.mark.parametrize("name", ["mnist_single.py", "mnist_ddp.py", "mnist_ddp_plain.py", "convnet.py"])
def test_a_folder_that_was_named_is_used_or_it_is_an_error(tmp_path: Path, name: str) -> None:
    """The digits are for those who have named none: the first line says so."""
    command, env = [sys.executable, str(EXAMPLES / name), "--epochs", "1"], {**os.environ, "OMP_NUM_THREADS": "1"}
    start = functools.partial(
        subprocess.run, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=scaled(LIMIT_S)
    )
    missing = tmp_path / "it's here"
    done = start([*command, "--data-dir", str(missing)])
    assert done.returncode == 2 and not done.stdout
    assert f"there is no MNIST in {missing}. Hint: on a login node: python scripts/download_data.py" in done.stderr
    assert "Traceback" not in done.stderr
    if name == "mnist_ddp_plain.py":
        return
    assert start(command).stdout.startswith("Data: the 1,437" if name == "convnet.py" else "Data: the 1,797")
    write_small_mnist(missing)
    assert start([*command, "--data-dir", str(missing)]).stdout.startswith(f"Data: {missing}\n")


def test_ranks_that_are_started_by_hand(tmp_path: Path) -> None:
    port = str(20_000 + os.getpid() % 10_000)
    common = ("--world-size", "2", "--master-port", port, "--epochs", "1")
    environments = [{"CLUSTER_DDP_RUN_DIR": str(tmp_path / "run"), "NUMBER": str(rank)} for rank in (0, 1)]
    ends = run_ranks(functools.partial(by_hand, common), environments, tmp_path)
    assert [end.exit_code for end in ends] == [0, 0], ends
    assert [end.output.count("Training completed in") for end in ends] == [1, 0]


def by_hand(arguments: tuple[str, ...]) -> None:
    run_example(EXAMPLES / "convnet.py", (*arguments, "--rank", os.environ["NUMBER"]), None)


def test_what_makes_one_device_many_is_shown() -> None:
    single, ddp = (training_lines(EXAMPLES / name) for name in ("mnist_single.py", "mnist_ddp.py"))
    diff = [line[0] + line[2:] for line in difflib.ndiff(single, ddp) if line[0] in "+-"]
    told = (EXAMPLES.parent / "docs" / "examples.md").read_text().partition("```diff\n")[2].partition("```")[0]
    assert diff == told.splitlines()


def training_lines(path: Path) -> list[str]:
    """From the function that trains on, without blank lines."""
    _, begin, text = path.read_text().partition("def train")
    return [line for line in (begin + text).splitlines() if line.strip()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_it_is_short_and_begins_with_its_command(script: Path) -> None:
    text = script.read_text()
    assert len(text.splitlines()) <= LINES.get(script.name, 120)
    assert f"examples/{script.name}" in (ast.get_docstring(ast.parse(text)) or "") or script.name == "hello_ddp.py"


def test_without_gpus_there_is_nothing_to_compare(tmp_path: Path) -> None:
    (end,) = run(tmp_path, name="data_parallel_comparison.py", ranks=1)
    assert (end.exit_code, "two or more are needed" in end.output) == (0, True), end


def test_each_way_to_meet_works(tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / "init_methods.py")]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=scaled(LIMIT_S))
    assert (done.returncode, done.stdout.count("works. It needs")) == (0, 3), done.stderr


def write_small_mnist(data_dir: Path) -> None:
    """96 images to train on and 32 to test, a stripe for each label."""
    raw = raw_folder(data_dir)
    raw.mkdir(parents=True)
    for idx_file, count in zip(IDX_FILES, (96, 96, 32, 32)):
        if "images" in idx_file.name:
            sizes = (count, 28, 28)
            content = bytes(
                255 * (row // 2 == image % 10) for image in range(count) for row in range(28) for _ in range(28)
            )
        else:
            sizes, content = (count,), bytes(image % 10 for image in range(count))
        (raw / idx_file.name).write_bytes(idx(sizes, content))


def test_torchvisions_resnet_says_once_that_its_data_is_not_there(tmp_path: Path) -> None:
    """As it is called without the folder, in one that has no data."""
    done = subprocess.run(
        [sys.executable, *TORCHRUN, str(EXAMPLES / "resnet_mnist.py")],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=scaled(LIMIT_S),
    )
    said = (
        "error: Reading MNIST from data/:\n  it is not there.\n  Hint: on a login node: python scripts/download_data.py"
    )
    assert done.returncode != 0
    assert done.stderr.count(said) == done.stderr.count("Hint:") == 1
    assert 'resnet_mnist.py", line' not in done.stderr


def test_torchvisions_resnet_is_trained_and_resumed(tmp_path: Path) -> None:
    write_small_mnist(tmp_path / "data")
    command = [sys.executable, str(EXAMPLES / "resnet_mnist.py"), str(tmp_path / "data")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CLUSTER_DDP_RUN_DIR": str(tmp_path / "run")}
    accuracies = []
    for _ in range(2):
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=scaled(LIMIT_S))
        assert done.returncode == 0, done.stderr
        accuracies += re.findall(r"accuracy (\S+)", done.stdout)
    assert len(accuracies) == 2
    assert accuracies[0] == accuracies[1]
    assert "All is done already (2 epochs)" in done.stdout
