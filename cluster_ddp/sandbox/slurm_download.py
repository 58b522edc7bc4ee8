"""Other releases of Slurm than the system's: Debian's packages, unpacked into a folder of the user's cache.

A prefix has its programs in bin and its plugins in lib/slurm, as `make install` of Slurm's sources leaves them. It uses
none of the system's libraries. The system's packages are not touched.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cluster_ddp.errors import SandboxError
from cluster_ddp.sandbox import prerequisites

SUITES = {"24.11": "trixie", "26.05": "forky"}
"""Slurm's release -> the release of Debian that has it."""
NEWEST = max(SUITES)
_WANTED = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge")
_FALLBACK_MIRROR = "http://deb.debian.org/debian"
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_CLIENTS = ("sacct", "salloc", "sattach", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")
_DAEMONS = ("munged", "slurmctld-wlm", "slurmd-wlm", "slurmstepd-wlm")
# slurmd under its own name: 24.11 stops with "certmgr plugin only allowed…" under another.
_SLURMD = """\
#!/bin/bash
daemons=$(dirname "$(readlink -f "$0")")/../debian/usr/sbin
exec -a slurmd "$daemons/slurmd-wlm" -d "$daemons/slurmstepd-wlm" "$@"
"""


def fetch(version: str) -> Path:
    """Download a release (30 MB), unless it is in the cache.

    Args:
        version: a key of `SUITES`.

    Returns:
        Its prefix, for `up --slurm`.

    Raises:
        SandboxError: it can't be downloaded or unpacked here.
    """
    prefix = cache() / f"slurm-{version}"
    if prefix.exists():
        return prefix
    print(f"Downloading Slurm {version} from Debian's packages into {prefix} …", file=sys.stderr, flush=True)
    prerequisites.install(("apt-get", "dpkg-deb", "patchelf"), ("patchelf",))
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=prefix.parent) as work:
        archives = download(f"Slurm {version}", SUITES[version], _WANTED, Path(work))
        _check_release(version, archives)
        unfinished = Path(work) / "prefix"
        unpack(archives, unfinished / "debian")
        _give_own_libraries(unfinished / "debian", prefix / "debian")
        _lay_out(unfinished)
        try:
            unfinished.rename(prefix)
        except OSError:
            if not prefix.exists():  # another process may have been quicker
                raise
    return prefix


def cache() -> Path:
    """Return the folder of what was downloaded: in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cluster_ddp"


def download(what: str, suite: str, names: Sequence[str], work: Path) -> list[Path]:
    """Download packages of a release of Debian and their dependencies, by an apt with its own configuration.

    Args:
        what: what they are, for errors.
        suite: the release.
        names: the packages.
        work: an empty folder.

    Returns:
        The packages' files, in `work`.

    Raises:
        SandboxError: they can't be had.
    """
    mirror = mirror_in(_apt_sources())
    asked = f"Downloading {what} from {mirror} ({suite}):"
    if not _KEYRING.exists():
        raise SandboxError(asked, f"{_KEYRING} is missing.", "apt-get install debian-archive-keyring")
    for folder in ("lists/partial", "cache/archives/partial"):
        (work / folder).mkdir(parents=True)
    (work / "status").touch()  # nothing is installed there
    (work / "sources.list").write_text(f"deb [signed-by={_KEYRING}] {mirror} {suite} main\n")
    settings = {
        "Dir::State::lists": work / "lists",
        "Dir::State::status": work / "status",
        "Dir::Cache": work / "cache",
        "Dir::Etc::sourcelist": work / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "APT::Update::Error-Mode": "any",  # else a mirror that does not answer is no error
        "APT::Sandbox::User": "root",  # the folder is in a home, where the user _apt may not read
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    prerequisites.call([*apt, "update"], asked)
    prerequisites.call([*apt, "install", "-y", "--download-only", "--no-install-recommends", *names], asked)
    return sorted((work / "cache/archives").glob("*.deb"))


def _check_release(version: str, archives: list[Path]) -> None:
    """Refuse packages of another release: a suite moves on."""
    if not any(archive.name.startswith(f"slurmctld_{version}.") for archive in archives):
        found = next((archive.name for archive in archives if archive.name.startswith("slurmctld_")), "none")
        hint = "choose another --slurm-version, or install this one and give --slurm PREFIX"
        raise SandboxError(f"Downloading Slurm {version} ({SUITES[version]}):", f"the mirror has {found}.", hint)


def _apt_sources() -> str:
    """The text of the machine's own apt sources."""
    places = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    return "\n".join(place.read_text() for place in places if place.suffix in (".list", ".sources") and place.exists())


def mirror_in(sources: str) -> str:
    """The first Debian mirror in the text of apt sources (.list or .sources); Debian's own if there is none."""
    found = re.search(r"^(?:deb |URIs:).*?(\S+://\S+/debian)/?(?:\s|$)", sources, re.MULTILINE)
    return found[1] if found else _FALLBACK_MIRROR


def unpack(archives: list[Path], root: Path) -> None:
    """Unpack packages into a new folder.

    Raises:
        SandboxError: one can't be unpacked.
    """
    root.mkdir(parents=True)
    for archive in archives:
        prerequisites.call(["dpkg-deb", "-x", str(archive), str(root)], f"Unpacking {archive.name}:")


def _give_own_libraries(root: Path, future_root: Path) -> None:
    """Let programs and plugins find the libraries, and the C library, that were unpacked with them."""
    (loader,) = (root / "usr").glob("lib*/ld-linux-*.so.*")
    libraries, plugins = loader.resolve().parent, _plugins(root)
    programs = [*(root / "usr/bin" / name for name in _CLIENTS), *(root / "usr/sbin" / name for name in _DAEMONS)]
    files = [*programs, *(path for path in plugins.glob("*.so*") if not path.is_symlink())]
    interpreter, *paths = (str(future_root / path.relative_to(root)) for path in (loader, libraries, plugins))
    asked = "Setting the library paths of Slurm's programs:"
    prerequisites.call(["patchelf", "--set-interpreter", interpreter, *map(str, programs)], asked)
    prerequisites.call(["patchelf", "--force-rpath", "--set-rpath", ":".join(paths), *map(str, files)], asked)


def _plugins(root: Path) -> Path:
    (plugins,) = (root / "usr/lib").glob("*/slurm-wlm")
    return plugins


def _lay_out(prefix: Path) -> None:
    """Make bin and lib/slurm: links into what was unpacked."""
    for folder in ("bin", "lib"):
        (prefix / folder).mkdir()
    for name in _CLIENTS:
        (prefix / "bin" / name).symlink_to(f"../debian/usr/bin/{name}")
    for name, file in (("munged", "munged"), ("slurmctld", "slurmctld-wlm")):
        (prefix / "bin" / name).symlink_to(f"../debian/usr/sbin/{file}")
    (prefix / "lib/slurm").symlink_to(Path("..") / _plugins(prefix / "debian").relative_to(prefix))
    (prefix / "bin/slurmd").write_text(_SLURMD)
    (prefix / "bin/slurmd").chmod(0o755)
