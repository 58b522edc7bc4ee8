"""Whether this Python can train: torch is there, and fits the GPUs. torch is not imported for that."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from cluster_ddp.doctor.checks import Site, check
from cluster_ddp.doctor.finding import Finding
from cluster_ddp.protocol import Env


def torch_versions() -> dict[str, str] | None:
    """Return torch's version, CUDA version ("None" for the CPU build) and folder; None if it is not installed."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    try:
        text = (folder / "version.py").read_text()
    except OSError:
        text = ""
    found = {"folder": str(folder)}
    for name, key in (("__version__", "version"), ("cuda", "cuda"), ("hip", "hip")):
        if match := re.search(rf"^{name}\b.*?=\s*'?([^'\n]+)'?", text, re.MULTILINE):
            found[key] = match[1].strip()
    return found


@check(detects="a Python without torch, or torch's CPU build on nodes with GPUs")
def torch_build(site: Site) -> Iterator[Finding]:
    """Look for torch, and at what it was built for."""
    found = torch_versions()
    if found is None:
        yield Finding(
            check="torch_build",
            what="This Python has no torch.",
            evidence=f"{sys.executable} (Python {sys.version.split()[0]})",
            hint="activate your environment in the batch script: --venv PATH, --conda-env NAME or --setup 'source …'",
        )
    elif (
        site.topology.gpus_on_node
        and site.env.get(Env.DUMMY_GPUS) != "1"
        and {found.get("cuda"), found.get("hip")} <= {"None", None}
    ):
        yield Finding(
            check="torch_build",
            what="This torch has no GPU support.",
            evidence=f"torch {found.get('version')} in {found['folder']}, GPUs here: {site.topology.gpus_on_node}",
            hint="install the build for your CUDA: pip install torch --index-url https://download.pytorch.org/whl/cu128",
        )


@check(detects="a Python outside of the environment that was activated")
def other_environment(site: Site) -> Iterator[Finding]:
    """Compare VIRTUAL_ENV with the Python that runs."""
    wanted = site.env.get("VIRTUAL_ENV")
    if not wanted:
        return
    if not Path(wanted).is_dir():
        yield Finding(
            check="other_environment",
            what="The virtual environment is not on a node.",
            evidence=f"VIRTUAL_ENV={wanted}: no such folder",
            hint="put it on a file system that all nodes share, or: cluster-ddp submit --stage-env",
            sick_nodes=(site.host,),
        )
    elif Path(wanted).resolve() != Path(sys.prefix).resolve():
        yield Finding(
            check="other_environment",
            what="Another Python runs than that of the activated environment.",
            evidence=f"VIRTUAL_ENV={wanted}, but Python runs from {sys.prefix}",
            hint="activate it last in the batch script: module load puts its own python first; type -a python",
            is_warning=True,
        )
