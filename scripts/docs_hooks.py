"""What `make docs` makes of the Markdown files before mkdocs reads them (mkdocs.yml names this file).

The files in docs/ are read on disk and in the repository, too, so nothing in them is for mkdocs only. In the site

- the README is the first page,
- the examples are there; a link to another file outside docs/ is the path of that file,
- the reference of the API has the docstrings, and that of the command line has the text of each --help,
- nothing is loaded from the network, or the build fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
EXAMPLES = [
    path for path in sorted((ROOT / "examples").rglob("*")) if path.suffix in (".py", ".sbatch", ".sh", ".toml", ".j2")
]
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
FROM_NETWORK = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*>""")
NAME_IN_TABLE = re.compile(r"^\| `(\w+)` \|", re.MULTILINE)
FIRST_CELL = re.compile(r"<tr>\s*<td>.*?</td>", re.DOTALL)
SHORT_CODE = re.compile(r"<code>([^<]{1,40})</code>")
ELEMENTS = (
    "a abbr autoref b br code dd details div dl dt em h[1-6] hr img li ol p pre small span strong summary "
    "table tbody td th thead tr ul"
)
NOT_HTML = re.compile(rf"<(?!/?(?:{ELEMENTS.replace(' ', '|')})\b)(?=/?[A-Za-z])")
VERBS = ("submit", "status", "train", "env", "sandbox", "sandbox up")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README as the first page, and the examples."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text()))
    for path in EXAMPLES:
        files.append(File.generated(config, str(path.relative_to(ROOT)), content=path.read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Return a page's text for the site."""
    name = page.file.src_uri
    folder = ROOT if name == "index.md" else (DOCS / name).parent
    markdown = LINK.sub(lambda link: _link(link, folder, name), markdown)
    if name in ("reference/api.md", "reference/errors.md"):
        return _with_docstrings(markdown)
    if name == "reference/cli.md":
        return markdown + "".join(_help(verb) for verb in VERBS)
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    r"""Keep short code at the beginning of a table's row on one line: a browser would break `--options` at hyphens.

    And take away the backslash of a `\|` in a table's code, which GitHub needs and Python-Markdown shows. What a
    docstring has in angle brackets, as in best-<name>.pt, is text and no element.
    """
    html = NOT_HTML.sub("&lt;", html)
    html = FIRST_CELL.sub(lambda cell: SHORT_CODE.sub(_short_code, cell.group()), html)
    return html.replace(r"\|", "|")


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Refuse a page that would load something from the network: the site is read from files, too."""
    from mkdocs.exceptions import PluginError

    if found := FROM_NETWORK.search(output):
        raise PluginError(f"{page.file.src_uri} loads something from the network: {found.group()}")
    return output


def _link(link: re.Match[str], folder: Path, page: str) -> str:
    """Return a link as it is in the site: from page to page, to an example, or else a path."""
    text, path, anchor = link.groups()
    target = Path(os.path.normpath(folder / path))
    if not target.exists():  # a link to another site, or code
        return link.group()
    if target.is_relative_to(DOCS) and target.suffix:
        return f"[{text}]({os.path.relpath(target, (DOCS / page).parent)}{anchor or ''})"
    if target in EXAMPLES:
        return f"[{text}]({os.path.relpath(target, (ROOT / page).parent)})"
    shown = f"`{target.relative_to(ROOT)}`"
    return shown if shown.strip("`").endswith(text.strip("`")) else f"{text} ({shown})"


def _short_code(code: re.Match[str]) -> str:
    """Return code with a class of assets/site.css: a name stays whole on a telephone, too."""
    return f'<code class="{"name" if len(code[1]) <= 18 else "one-line"}">{code[1]}</code>'


def _with_docstrings(markdown: str) -> str:
    """Link the names in a page's table to their docstrings, which follow; and begin with all names."""
    names = NAME_IN_TABLE.findall(markdown)
    markdown = NAME_IN_TABLE.sub(r"| [`\1`][cluster_ddp.\1] |", markdown)
    first, table = markdown.split("\n| ", 1)
    contents = " · ".join(f"[`{name}`][cluster_ddp.{name}]" for name in names)
    markdown = f"{first}\nIn full: {contents}\n\n| {table}"
    return f"{markdown}\n## In full\n" + "".join(f"\n::: cluster_ddp.{name}\n" for name in names)


def _help(verb: str) -> str:
    """Return a section with the text of a verb's --help."""
    words = [sys.executable, "-m", "cluster_ddp", *verb.split(), "--help"]
    env = {**os.environ, "COLUMNS": "100", "PYTHONPATH": str(ROOT)}
    text = subprocess.run(words, check=True, capture_output=True, text=True, env=env).stdout
    return f"\n## cluster-ddp {verb}\n\n```text\n{text.strip()}\n```\n"
