"""What scripts import: these names, from `cluster_ddp` alone."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cluster_ddp
from cluster_ddp import errors

ROOT = Path(__file__).parents[2]
SCRIPTS = [ROOT / "cluster_ddp" / "mnist" / "training.py", *sorted((ROOT / "examples").glob("*.py"))]


@pytest.mark.quick
@pytest.mark.parametrize("name", cluster_ddp.__all__)
def test_each_name_is_there_and_documented(name: str) -> None:
    value = getattr(cluster_ddp, name)
    assert name == "__version__" or len(inspect.getdoc(value) or "") > 20


def test_dir_shows_the_names_and_help_the_arguments_of_submit() -> None:
    assert dir(cluster_ddp) == cluster_ddp.__all__
    code = "import cluster_ddp, pydoc; print(pydoc.plaintext.document(cluster_ddp.submit))"
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[0].startswith(
        "submit(spec: 'JobSpec', function_or_command: 'Callable[..., Any] | Sequence[str] | None' = None"
    )
    assert lines[1:5] == [
        "    Submit a job, and return it without waiting for it.",
        "    ",
        "    Args:",
        "        spec: what to run, and on how many nodes and GPUs.",
    ]


def test_the_reference_has_each_name() -> None:
    text = "".join((ROOT / "docs" / "reference" / page).read_text() for page in ("api.md", "errors.md"))
    assert sorted([*re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE), "__version__"]) == sorted(cluster_ddp.__all__)


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Checkpoint'"):
        _ = cluster_ddp.Checkpoint


def test_the_whole_tree_of_errors_is_public() -> None:
    tree = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert tree == {name for name in cluster_ddp.__all__ if name.endswith("Error")}
    assert all(issubclass(getattr(errors, name), cluster_ddp.ClusterDDPError) for name in tree)
    assert all(name in str(errors.__doc__) for name in tree)


def test_it_is_typed() -> None:
    assert Path(cluster_ddp.__file__).with_name("py.typed").exists()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_loop_to_copy_and_the_examples_import_from_it_only(script: Path) -> None:
    """But for the loop's own workload and its options."""
    found = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    ours = {name for name in found if name.startswith("cluster_ddp") and not name.startswith("cluster_ddp.mnist")}
    assert ours <= {"cluster_ddp"}
