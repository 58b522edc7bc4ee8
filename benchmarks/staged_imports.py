"""What --stage-env gains: `import torch` from a file system with slow look-ups, and from a copy on the node's own disk.

    python benchmarks/staged_imports.py [--delays-ms 0 1 3] [--ranks 2]

Every look-up below the environment is slowed by slow_lookups.c (LD_PRELOAD; the dynamic linker's own look-ups are not).
The environment is the one that has torch. It is packed and unpacked once, for real. Needs a C compiler.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from record import Figure, report, unable

from cluster_ddp.submission.frozen import venv_archive

VENV = Path(torch.__file__).parents[4]
ROUNDS = 3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delays-ms", type=float, nargs="+", default=[0, 1, 3], help="(default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="processes at once (default: %(default)s)")
    options = parser.parse_args()
    compiler = shutil.which("cc")
    if compiler is None or not (VENV / "pyvenv.cfg").is_file():
        unable("there is no C compiler" if compiler is None else f"torch is not in a virtual environment: {VENV}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        slow = folder / "slow.so"
        source = Path(__file__).with_name("slow_lookups.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", slow, source, "-ldl"], check=True)
        lookups = _lookups(slow, folder / "count")  # and later imports find the files in memory
        packed_s, unpacked_s, copy = _stage(folder)
        imported = {ms: _imported_s(VENV, options.ranks, slow, ms) for ms in options.delays_ms}
        staged_s = [unpacked_s + seconds for seconds in _imported_s(copy, options.ranks, slow, 0.0)]
    staged = "unpacked, then imported from there"
    report(
        Figure(what="look-ups of one `import torch`", values=[lookups], unit="look-ups"),
        Figure(what="packing the environment, once", values=[packed_s], unit="s"),
        Figure(what="unpacking it on a node", values=[unpacked_s], unit="s"),
        Figure(what=f"{staged}, {options.ranks} ranks", values=staged_s, unit="s"),
        *(
            Figure(
                what=f"imported where it is, {ms:g} ms longer for each look-up, {options.ranks} ranks",
                values=seconds,
                unit="s",
                ratios=[mine / theirs for mine, theirs in zip(seconds, staged_s)],
                peer=staged,
            )
            for ms, seconds in imported.items()
        ),
        environment_gb=round(sum(path.lstat().st_size for path in VENV.rglob("*")) / 1e9, 2),
    )


def _stage(folder: Path) -> tuple[float, float, Path]:
    """Pack and unpack. The seconds of both, and the copy."""
    archive, copy = folder / "env.tar", folder / "copy"
    copy.mkdir()
    start_s = time.monotonic()
    with contextlib.redirect_stderr(io.StringIO()):
        venv_archive.pack(VENV, archive, shared=False)
    packed_s = time.monotonic() - start_s
    os.sync()
    start_s = time.monotonic()
    subprocess.run(["tar", "-xf", archive, "-C", copy], check=True)
    unpacked_s = time.monotonic() - start_s
    archive.unlink()
    return packed_s, unpacked_s, copy


def _imported_s(venv: Path, ranks: int, slow: Path, delay_ms: float) -> list[float]:
    """Seconds until all ranks have imported torch, for each round."""
    env = {**os.environ, "LD_PRELOAD": str(slow), "SLOW_FOLDER": str(venv), "SLOW_US": str(int(1000 * delay_ms))}
    seconds = []
    for _ in range(ROUNDS):
        start_s = time.monotonic()
        started = [_start(venv, env) for _ in range(ranks)]
        assert [process.wait() for process in started] == [0] * ranks
        seconds.append(time.monotonic() - start_s)
    return seconds


def _lookups(slow: Path, count: Path) -> int:
    """How many look-ups below the environment an import makes."""
    env = {**os.environ, "LD_PRELOAD": str(slow), "SLOW_FOLDER": str(VENV), "SLOW_COUNT": str(count)}
    assert _start(VENV, env).wait() == 0
    return sum(int(line) for line in count.read_text().split())


def _start(venv: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([venv / "bin" / "python", "-c", "import torch"], env=env)


if __name__ == "__main__":
    main()
