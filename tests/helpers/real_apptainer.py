"""A real Apptainer, from Debian's packages, and an image that shows this machine's own programs.

It is unpacked into the user's cache, as other releases of Slurm are: it uses none of the system's libraries.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from cluster import ROOT

from cluster_ddp.sandbox import prerequisites, slurm_download

SUITE = "sid"  # the only one that has it

_SITES = [folder for folder in sys.path if folder.endswith("site-packages")]
BINDS = tuple(dict.fromkeys(["/usr", sys.base_prefix, sys.prefix, str(ROOT), *_SITES]))
"""Folders of this machine that `image` needs for its Python, torch and this package."""


def fetch() -> Path:
    """Download Apptainer (40 MB), unless it is in the cache. Returns the folder of its program.

    Raises:
        SandboxError: it can't be downloaded or unpacked here.
    """
    root = slurm_download.cache() / "apptainer"
    if not root.exists():
        prerequisites.install(("apt-get", "dpkg-deb", "patchelf"), ("patchelf",))
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root.parent) as work:
            archives = slurm_download.download("Apptainer", SUITE, ("apptainer",), Path(work))
            slurm_download.unpack(archives, Path(work) / "root")
            _settle(Path(work) / "root", root)
            (Path(work) / "root").rename(root)
    return root / "usr/bin"


def _settle(root: Path, future_root: Path) -> None:
    """Let its programs find their libraries, their configuration and the folder of their mounts."""
    (loader,) = (root / "usr/lib").glob("*/ld-linux-*.so.*")
    libraries = loader.parent
    programs = [str(root / "usr/bin/apptainer"), str(libraries / "apptainer/bin/starter")]
    interpreter, path = (str(future_root / one.relative_to(root)) for one in (loader, libraries))
    asked = "Setting the library paths of Apptainer:"
    prerequisites.call(["patchelf", "--set-interpreter", interpreter, *programs], asked)
    prerequisites.call(["patchelf", "--force-rpath", "--set-rpath", path, *programs], asked)
    (root / "usr/etc").symlink_to("../etc")
    for folder in ("usr/var", "usr/lib/var"):
        (root / folder / "lib/apptainer/mnt/session").mkdir(parents=True)
    settings = root / "etc/apptainer/apptainer.conf"
    # As root it asks for all capabilities, and ends where the machine lacks one.
    settings.write_text(re.sub(r"(?m)^(root default capabilities) = .*", r"\1 = no", settings.read_text()))


def image(folder: Path) -> None:
    """Make an image: a folder (what Apptainer calls a sandbox) that has nothing but what is bound into it."""
    for name in ("usr", "etc", "proc", "sys", "dev", "tmp", "var/tmp", "root", "home"):
        (folder / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        (folder / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group", "hosts", "resolv.conf", "localtime"):
        (folder / "etc" / name).touch()
