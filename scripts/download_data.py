"""Fetch MNIST to where torchvision's MNIST class looks for it. Run it on a login node: compute nodes have no internet.

    python scripts/download_data.py                          from the mirrors into data/MNIST/raw
    python scripts/download_data.py --from ~/mnist           from files that you have copied there, as .gz or unpacked
    python scripts/download_data.py --mirror http://host/    from a mirror of your own, tried first

It checks the unpacked content (SHA-256); mirrors may compress it in any way. A file gets its name only when it is
complete and right. Files that are right already are kept.
"""

from __future__ import annotations

import argparse
import gzip
import os
import shlex
import sys
import tempfile
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path

from cluster_ddp.errors import DataError, exit_on_error, printable
from cluster_ddp.mnist.data import IDX_FILES, IdxFile, complaint, raw_folder

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
# How much longer a packed file may be than its content, and the last read than the file.
_PACKING_BYTES = 64 * 1024


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, fetch what is missing, say what to submit next. Returns the exit status."""
    options = parser().parse_args(argv)
    with exit_on_error("download_data.py"):
        if options.dataset == "mnist":
            fetch(options)
        else:
            print("digits is in the package: nothing to download.")
    arguments = "" if options.dataset == "mnist" else " --dataset digits"
    if options.data_dir != Path("data") and options.dataset == "mnist":
        arguments = f" --data-dir {shlex.quote(str(options.data_dir.absolute()))}"
    print(f"Next: sbatch jobs/mnist_2node.sbatch{arguments}")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="download_data.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--data-dir", type=Path, default=Path("data"), help="folder for MNIST/raw (default: %(default)s)")
    top.add_argument("--dataset", choices=["mnist", "digits"], default="mnist", help="digits needs no download")
    top.add_argument("--mirror", action="append", default=[], metavar="URL", help="mirror to try first")
    top.add_argument("--from", dest="source", type=Path, metavar="FOLDER", help="folder with MNIST's four files")
    top.add_argument("--timeout-s", type=float, default=30, help="seconds to wait for an answer (default: %(default)s)")
    top.add_argument("--deadline-s", type=float, default=900, help="seconds per file and mirror (default: %(default)s)")
    top.add_argument("--retries", type=int, default=2, help="retries per file and mirror (default: %(default)s)")
    return top


def fetch(options: argparse.Namespace) -> None:
    """Fetch those of MNIST's four files that are missing or damaged.

    Raises:
        DataError: no mirror has a file, the given folder does not have it, or it can't be written.
    """
    folder = raw_folder(options.data_dir)
    missing = [f for f in IDX_FILES if complaint(folder / f.name, f)]
    for idx_file in IDX_FILES:
        if idx_file not in missing:
            print(f"{folder / idx_file.name}: already there")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for idx_file in missing:
            if options.source is not None:
                _from_folder(options.source, idx_file, folder)
            else:
                _from_mirrors([*options.mirror, *MIRRORS], idx_file, folder, options)
    except OSError as error:
        raise DataError(
            f"Writing MNIST to {folder.absolute()}:",
            f"{error.strerror or error}.",
            "choose a folder that you may write to and that all nodes see: --data-dir PATH",
        ) from error


def _from_folder(source: Path, idx_file: IdxFile, folder: Path) -> None:
    places = [place / name for place in (source, raw_folder(source)) for name in (idx_file.name, f"{idx_file.name}.gz")]
    found = next((place for place in places if place.exists()), None)
    problem = f"neither {idx_file.name} nor {idx_file.name}.gz is there"
    if found is not None:
        problem = _place(found, idx_file, folder) or ""
    if problem:
        raise DataError(
            f"Taking {idx_file.name} from {source.absolute()}:",
            f"{problem}.",
            "copy MNIST's four files into that folder, unchanged, as .gz or unpacked",
        )
    print(f"{folder / idx_file.name}: taken from {found}")


def _from_mirrors(mirrors: Sequence[str], idx_file: IdxFile, folder: Path, options: argparse.Namespace) -> None:
    problems: list[str] = []
    for mirror in mirrors:
        url = f"{mirror.rstrip('/')}/{idx_file.name}.gz"
        with tempfile.TemporaryDirectory() as temporary:
            most_bytes = idx_file.size + _PACKING_BYTES
            problem = _download(url, Path(temporary), most_bytes, options) or _place(
                Path(temporary) / f"{idx_file.name}.gz", idx_file, folder
            )
        if problem is None:
            print(f"{folder / idx_file.name}: downloaded from {mirror}")
            return
        problems.append(f"{url}: {problem}")
    raise DataError(
        f"Downloading {idx_file.name}:",
        "\n  ".join(problems),
        "without internet here, download the four .gz files from one of these mirrors elsewhere, copy them here, "
        f"and run: python scripts/download_data.py --data-dir {shlex.quote(str(options.data_dir))} --from FOLDER",
    )


def _download(url: str, folder: Path, most_bytes: int, options: argparse.Namespace) -> str | None:
    """Download a file into a folder; what went wrong in words, or None."""
    import pooch
    import requests

    base_url, _, name = url.rpartition("/")
    manager = pooch.create(
        path=folder,
        base_url=f"{base_url}/",
        registry={name: None},
        retry_if_failed=options.retries,
    )
    problems: list[str] = []

    def fetch() -> None:
        try:
            downloader = pooch.HTTPDownloader(progressbar=bar, timeout=options.timeout_s)
            manager.fetch(name, downloader=downloader)
        except (requests.RequestException, ValueError, OSError) as error:
            problems.append(_reason(error))

    # In a thread: requests' time limit is one for each read, and a server may send a byte now and then.
    with _Bar(name, most_bytes) as bar:
        thread = threading.Thread(target=fetch, daemon=True)
        thread.start()
        thread.join(options.deadline_s)
        if thread.is_alive():
            return f"not done after {options.deadline_s:g} s"
    return problems[0] if problems else None


def _reason(error: BaseException) -> str:
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return printable(str(error) or type(error).__name__)[:300]  # a server's words may be in it


class _Bar:
    """The progress bar that pooch drives, shown on a terminal. It ends a download that is too long or was given up."""

    def __init__(self, name: str, most_bytes: int) -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        columns = (TextColumn(name), BarColumn(), DownloadColumn())
        self._progress = Progress(*columns, transient=True, disable=not sys.stderr.isatty())
        self._task = self._progress.add_task(name)
        self._most_bytes, self._bytes, self._given_up = most_bytes, 0, False

    @property
    def total(self) -> float | None:
        """Size of the download in bytes."""
        return self._progress.tasks[0].total

    @total.setter
    def total(self, value: float) -> None:
        self._bytes = 0  # each attempt begins with it
        self._progress.update(self._task, total=value)

    def update(self, more: int) -> None:
        """Count the bytes that were read. Raises OSError, which ends the download."""
        self._bytes += more
        if self._given_up or self._bytes > self._most_bytes:
            raise OSError(f"more than {self._most_bytes:,} bytes came, and the file has fewer")
        self._progress.advance(self._task, more)

    def reset(self) -> None:
        """Start again."""
        self._bytes = 0
        self._progress.reset(self._task)

    def close(self) -> None:
        """pooch calls it at the end."""

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._given_up = True
        self._progress.stop()


def _place(source: Path, idx_file: IdxFile, folder: Path) -> str | None:
    """Unpack a file to its place if its content is right; what is wrong in words, or None."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unpack-") as temporary:
        unpacked = Path(temporary) / idx_file.name
        opened = gzip.open if source.suffix == ".gz" else open
        try:
            with opened(source, "rb") as packed, open(unpacked, "wb") as target:
                left = idx_file.size + 1
                while block := packed.read(min(left, 1 << 20)):
                    target.write(block)
                    left -= len(block)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            return f"{source.name} can't be unpacked: {error}"
        if not left:
            return f"{source.name} holds more than the {idx_file.size:,} bytes of {idx_file.name}"
        if problem := complaint(unpacked, idx_file):
            return problem
        with open(unpacked, "rb+") as content:
            os.fsync(content.fileno())
        unpacked.replace(folder / idx_file.name)
    return None


if __name__ == "__main__":
    sys.exit(main())
