"""Every block of code in the README and in docs/ runs, or says what there is.

Python runs, a page's blocks in order. Commands are checked as far as they can be without Slurm: ours by their own
command lines, others by what they name. A block of a kind that nobody checks fails.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import doc_preambles
import pytest
from ranks import run_ranks

import cluster_ddp
from cluster_ddp import train
from cluster_ddp.__main__ import VERBS
from cluster_ddp.cli import submit
from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.remote import remote_verbs
from cluster_ddp.run.names import Env
from cluster_ddp.submission.cli import settings_files
from cluster_ddp.submission.cli.options import is_sbatchs

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

KINDS = {
    "python": "runs",
    "toml": "is loaded as a cluster.toml",
    "diff": "names lines of the examples",
    "text": "is what a program prints, or a drawing",
    "shell": "has commands, each checked by itself (indented blocks)",
    "bash": "is a batch script, or lines of one",
}
# Commands that are not ours, with the reason why they are not checked.
NOT_CHECKED = {
    "pip": "installs",
    "source": "activates an environment that `make venv` makes",
    "export": "sets a variable",
    "cp": "copies an example",
    "salloc": "Slurm's",
    "scancel": "Slurm's",
    "squeue": "Slurm's",
    "exit": "leaves a shell",
}
A_READERS_FILES = ("my_train.py", "t.py", "image.sif")


class Block(NamedTuple):
    page: Path
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks_of(page: Path) -> list[Block]:
    """Fenced blocks by the kind that they name, and indented ones, which are commands."""
    blocks, lines, at = [], page.read_text().splitlines(), 0
    while at < len(lines):
        begin = at
        if lines[at].startswith("```"):
            kind = lines[at].removeprefix("```").strip()
            at = next(i for i in range(at + 1, len(lines)) if lines[i].startswith("```")) + 1
            blocks.append(Block(page, begin + 1, kind, "\n".join(lines[begin + 1 : at - 1])))
        elif lines[at].startswith("    ") and not lines[at - 1].strip():
            while at < len(lines) and lines[at].startswith("    "):
                at += 1
            blocks.append(Block(page, begin + 1, "shell", textwrap.dedent("\n".join(lines[begin:at]))))
        else:
            at += 1
    return blocks


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def of_kind(kind: str) -> list[Block]:
    return [block for block in BLOCKS if block.kind == kind]


def test_blocks_of_all_kinds_are_found() -> None:
    assert {block.kind for block in BLOCKS} >= KINDS.keys()
    assert len(of_kind("python")) > 20


def test_each_block_is_of_a_kind_that_is_checked() -> None:
    unknown = [str(block) for block in BLOCKS if block.kind not in KINDS]
    outputs = [str(block) for block in BLOCKS if block.kind == "" and block.page == ROOT / "README.md"]
    assert unknown == outputs, f"name one of {', '.join(KINDS)} after the ```"


def makes_a_world(block: Block) -> bool:
    return "cluster_ddp.distributed(" in block.text


@pytest.mark.parametrize("block", [*filter(makes_a_world, of_kind("python"))], ids=str)
def test_a_script_runs(block: Block, tmp_path: Path) -> None:
    succeed([block], tmp_path)


WITH_PYTHON = dict.fromkeys(block.page for block in of_kind("python"))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(one, id=name_of(one), marks=[] if one == ROOT / "README.md" else pytest.mark.full)
        for one in WITH_PYTHON
    ],
)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    """In one namespace, in a world of one."""
    if blocks := [block for block in of_kind("python") if block.page == page and not makes_a_world(block)]:
        succeed(blocks, tmp_path)


def succeed(blocks: list[Block], folder: Path) -> None:
    (end,) = run_ranks(functools.partial(run, blocks, folder), [{}], folder)
    assert end.exit_code == 0, end.output


def run(blocks: list[Block], folder: Path) -> None:
    """In a process of its own."""
    os.chdir(folder)
    multiprocessing.set_start_method("fork", force=True)  # of a loader's workers, as in a process that Python starts
    names: dict[str, object] = {"__name__": "__main__"}
    exec(doc_preambles.FOR_ALL, names)
    if makes_a_world(blocks[0]):
        return execute(blocks, names)
    with cluster_ddp.distributed(cuda=False) as world:
        names["world"] = world
        exec(doc_preambles.IN_A_WORLD + doc_preambles.OF_PAGE.get(name_of(blocks[0].page), ""), names)
        execute(blocks, names)


def execute(blocks: list[Block], names: dict[str, object]) -> None:
    for block in blocks:
        code = ast.parse(textwrap.dedent(block.text))
        ast.increment_lineno(code, block.line)
        os.environ["CLUSTER_DDP_RUN_DIR"] = f"runs/block-{block.line}"  # each may be another training
        exec(compile(code, str(block.page), "exec"), names)
        if "shard = world.shard(" in block.text and not makes_a_world(block):
            assert len(list(names["shard"])) > 0  # type: ignore[call-overload]  # its batches can be made
    names.clear()  # ends a loader's workers


@pytest.mark.parametrize("block", of_kind("toml"), ids=str)
def test_settings_are_legal(block: Block, tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(block.text)
    for profile in (None, *re.findall(r"^\[(\w+)\]", block.text, re.MULTILINE)):
        assert settings_files.load(profile, folder=tmp_path, env={}).values


@pytest.mark.parametrize("block", of_kind("diff"), ids=str)
def test_a_diff_names_lines_that_are_there(block: Block) -> None:
    """From one device to many it is that of docs/examples.md, which test_examples.py compares with the scripts.

    That of a whole training, it runs.
    """
    if name_of(block.page) == "docs/how-to/whole-training.md":
        return
    if "+import cluster_ddp" in block.text:
        assert block.text in (ROOT / "docs" / "examples.md").read_text()
    lines = "".join((ROOT / "examples" / name).read_text() for name in ("mnist_single.py", "mnist_ddp.py")).splitlines()
    assert all(line[1:] in lines for line in block.text.splitlines() if line[0] == "-")


@pytest.mark.parametrize("block", of_kind("bash"), ids=str)
def test_a_batch_script_is_one(block: Block) -> None:
    """Bash can read it, sbatch has its options, and our verbs have theirs."""
    done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    lines = block.text.splitlines()
    assert all(is_sbatchs(line.split()[1]) for line in lines if line.startswith("#SBATCH "))
    ours = [line.removeprefix("exec ").removesuffix(" &") for line in lines]
    for line in ours:
        if line.startswith("cluster-ddp "):
            check(shlex.split(line))


def test_the_shortest_job_is_shown_as_it_is() -> None:
    shown = next(block.text for block in of_kind("bash") if name_of(block.page) == "docs/how-to/jobs.md")
    assert f"{shown}\n" == (ROOT / "jobs" / "minimal.sbatch").read_text()


COMMANDS = [
    (str(block), line)
    for block in of_kind("shell")
    for line in block.text.splitlines()
    if line.strip() and not line.startswith("#")
]


@pytest.mark.full
@pytest.mark.parametrize(("where", "line"), COMMANDS, ids=[f"{where} {line[:40]}" for where, line in COMMANDS])
def test_a_command_is_one(
    where: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name in A_READERS_FILES:
        (tmp_path / name).touch()
    check(shlex.split(re.sub(r"\s+#\s.*", "", line)))


def check(words: list[str]) -> None:
    """Fail if a command names what is not there."""
    if words[:2] == ["sudo", "env"]:
        words = words[3:]
    if words[0].startswith("CLUSTER_DDP_"):
        name, words = words[0].partition("=")[0], words[1:]
        assert name in vars(Env).values(), name
    if words[0] == "srun":
        words = words[1:]
    first, rest = words[0], words[1:]
    if words[:2] == ["python", "-m"] and words[2].startswith("cluster_ddp."):
        assert importlib.util.find_spec(words[2])
        check_ours(words[2].removeprefix("cluster_ddp."), words[3:])
    elif words[:3] == ["python", "-m", "cluster_ddp"]:
        check_ours(words[3], words[4:])
    elif first == "cluster-ddp":
        check_ours(rest[0], rest[1:])
    elif words[:2] == ["python", "-c"]:
        ast.parse(words[2])
    elif first in ("python", "torchrun", "sbatch"):
        path = next(word for word in rest if "/" in word and not word.startswith("-"))
        assert (ROOT / path).is_file(), path
        after = rest[rest.index(path) + 1 :]
        if path.startswith("jobs/mnist"):
            train.check(after, {}, with_data=False)
    elif first == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        variables = re.findall(r"^(\w+) \??=", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in rest if "=" not in word} <= {*targets}
        assert {word.partition("=")[0] for word in rest if "=" in word} <= {*variables}
    else:
        assert first in NOT_CHECKED, f"{first}: check it here, or add it to NOT_CHECKED with a reason"


def check_ours(verb: str, words: list[str]) -> None:
    assert verb in VERBS
    _, words = remote_verbs.split(words)
    own = words[: words.index("--")] if "--" in words else words
    if verb == "submit":
        check_submit(words)
    elif verb == "train":
        train.check(words, {}, with_data=False)
    else:
        options = [word.partition("=")[0] for word in own if word.startswith("-")]
        names = [verb, *(own[:1] if verb == "sandbox" else [])]
        assert {*options} <= {*re.findall(r"--?[a-z][\w-]*", help_of(*names))}, help_of(*names)
    if "--" in words and verb == "sandbox":
        check(words[words.index("--") + 1 :])


def check_submit(words: list[str]) -> None:
    """Plan the job. One to resume must have been submitted before: there only the options are checked."""
    if "--resume" in words:
        assert {word for word in words if word.startswith("--")} <= {*re.findall(r"--[a-z-]+", help_of("submit"))}
        return
    try:
        assert submit.main(["--dry-run", *(word for word in words if word != "--watch")]) == 0
    except ClusterDDPError as error:
        pytest.fail(str(error))


@functools.cache
def help_of(*verb: str) -> str:
    """All options of a verb."""
    command = [sys.executable, "-m", "cluster_ddp", *verb]
    asked = "--help-all" if verb in (("submit",), ("launch",)) else "--help"
    return subprocess.run([*command, asked], check=True, capture_output=True, text=True).stdout


def test_the_site_has_each_page() -> None:
    """`make docs` refuses others, too, but needs mkdocs."""
    named = re.findall(r"- (?:[\w ]+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [str(page.relative_to(ROOT / "docs")) for page in PAGES if page != ROOT / "README.md"]
    assert sorted(named) == sorted(["index.md", *pages]), "name each page in mkdocs.yml, under nav"


def test_the_readme_is_short() -> None:
    """Code and output included; what is longer belongs into docs/."""
    assert len((ROOT / "README.md").read_text().split()) <= 600
