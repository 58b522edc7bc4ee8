"""What the documentation's site makes of links, of angle brackets and of the page of the API; without mkdocs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cluster_ddp

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "scripts"))
import docs_hooks  # noqa: E402


def page(name: str) -> Any:
    return SimpleNamespace(file=SimpleNamespace(src_uri=name))


@pytest.mark.parametrize(
    ("name", "link", "in_site"),
    [
        ("how-to/jobs.md", "[hello](../../examples/hello_ddp.py)", "[hello](../examples/hello_ddp.py)"),
        (
            "examples.md",
            "[its](../examples/slurm/mnist_ddp_plain.sbatch)",
            "[its](examples/slurm/mnist_ddp_plain.sbatch)",
        ),
        ("index.md", "[Examples](docs/examples.md)", "[Examples](examples.md)"),
        ("how-to/jobs.md", "[submit](submit.md#an-array)", "[submit](submit.md#an-array)"),
        ("how-to/jobs.md", "[minimal](../../jobs/minimal.sbatch)", "minimal (`jobs/minimal.sbatch`)"),
        ("how-to/jobs.md", "[Slurm](https://slurm.schedmd.com)", "[Slurm](https://slurm.schedmd.com)"),
    ],
)
def test_a_link(name: str, link: str, in_site: str) -> None:
    assert docs_hooks.on_page_markdown(link, page(name)) == in_site


def test_the_site_has_all_that_the_documents_link_in_examples() -> None:
    linked = {
        (document.parent / link[2]).resolve()
        for document in docs_hooks.DOCS.rglob("*.md")
        for link in docs_hooks.LINK.finditer(document.read_text())
        if "examples/" in link[2] and not link[2].startswith("http")
    }
    assert len(linked) > 10
    assert {path for path in linked if path.is_file()} <= {*docs_hooks.EXAMPLES}


@pytest.mark.parametrize(
    ("html", "shown"),
    [
        ("<p>checkpoints/best-<name>.pt</p>", "<p>checkpoints/best-&lt;name>.pt</p>"),
        ("<p>runs/training-<job id, or date></p>", "<p>runs/training-&lt;job id, or date></p>"),
        (
            '<p><code>&lt;name&gt;</code><br /><a href="#x">x</a></p>',
            '<p><code>&lt;name&gt;</code><br /><a href="#x">x</a></p>',
        ),
    ],
)
def test_a_name_in_angle_brackets_is_shown(html: str, shown: str) -> None:
    assert docs_hooks.on_page_content(html) == shown


def test_the_api_begins_with_all_names() -> None:
    text = docs_hooks.on_page_markdown((docs_hooks.DOCS / "reference" / "api.md").read_text(), page("reference/api.md"))
    contents = next(line for line in text.splitlines() if line.startswith("In full: "))
    assert text.index(contents) < text.index("| name |")
    names = [name for name in cluster_ddp.__all__ if not name.endswith("Error") and name != "__version__"]
    assert contents.count("[cluster_ddp.") == text.count("\n::: cluster_ddp.") == len(names)
