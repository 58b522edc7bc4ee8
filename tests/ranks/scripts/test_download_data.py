"""The downloader, against a mirror on this machine; a small stand-in for the four files, with digests to match."""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import http.server
import importlib.util
import os
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from cluster_ddp.mnist import data
from cluster_ddp.runtime.world import World
from cluster_ddp.slurm.topology import Topology

SCRIPT = Path(__file__).parents[3] / "scripts" / "download_data.py"
CONTENTS = {f"file-{i}": bytes([i]) * 5000 for i in range(4)}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    spec = importlib.util.spec_from_file_location("download_data", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    idx_files = tuple(data.IdxFile(n, len(c), hashlib.sha256(c).hexdigest()) for n, c in CONTENTS.items())
    monkeypatch.setattr(module, "IDX_FILES", idx_files)
    monkeypatch.setattr(module, "MIRRORS", ())
    return module


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        self.server.requests.append(self.path)


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[http.server.ThreadingHTTPServer]:
    folder = tmp_path / "mirror"
    folder.mkdir()
    for name, content in CONTENTS.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    server.folder, server.url, server.requests = folder, f"http://127.0.0.1:{server.server_port}/", []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def assert_complete(data_dir: Path) -> None:
    assert {path.name: path.read_bytes() for path in data.raw_folder(data_dir).iterdir()} == CONTENTS


def dead_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}/"


@pytest.mark.quick
def test_downloads_what_is_missing_and_nothing_twice(script, mirror, tmp_path: Path, capsys) -> None:
    arguments = ["--data-dir", str(tmp_path / "it's data"), "--mirror", mirror.url]
    assert script.main(arguments) == 0
    assert_complete(tmp_path / "it's data")
    assert capsys.readouterr().out.splitlines()[-1].startswith("Next: sbatch jobs/mnist_2node.sbatch --data-dir ")
    assert len(mirror.requests) == 4
    assert script.main(arguments) == 0
    assert len(mirror.requests) == 4
    (data.raw_folder(tmp_path / "it's data") / "file-2").write_bytes(b"damaged")
    assert script.main(arguments) == 0
    assert mirror.requests[4:] == ["/file-2.gz"]
    assert_complete(tmp_path / "it's data")


def test_tries_mirrors_in_turn(script, mirror, tmp_path: Path) -> None:
    mirrors = ["--mirror", dead_url(), "--mirror", mirror.url]
    assert script.main(["--data-dir", str(tmp_path / "d"), "--retries", "0", *mirrors]) == 0
    assert_complete(tmp_path / "d")


@pytest.mark.parametrize("damage", ["truncated", "other content", "not packed"])
def test_a_damaged_download_is_never_put_in_place(script, mirror, tmp_path: Path, capsys, damage: str) -> None:
    path = mirror.folder / "file-1.gz"
    packed = gzip.compress(b"wrong" * 1000)
    path.write_bytes({"truncated": path.read_bytes()[:-9], "other content": packed, "not packed": b"<html>"}[damage])
    with pytest.raises(SystemExit) as caught:
        script.main(["--data-dir", str(tmp_path / "d"), "--mirror", mirror.url])
    assert caught.value.code == 2
    assert [path.name for path in data.raw_folder(tmp_path / "d").iterdir()] == ["file-0"]
    message = capsys.readouterr().err
    assert "file-1.gz: file-1" in message
    assert "--from FOLDER" in message


HEADERS = b"HTTP/1.0 200 OK\r\nContent-Type: application/gzip\r\n"


def endless(write: Callable[[bytes], object]) -> None:
    write(HEADERS + b"\r\n")
    while True:
        write(bytes(1 << 16))


def drops_of_content(write: Callable[[bytes], object]) -> None:
    write(HEADERS + b"\r\n")
    while True:
        time.sleep(0.1)
        write(b"\0")


def drops_of_headers(write: Callable[[bytes], object]) -> None:
    write(HEADERS)
    while True:
        time.sleep(0.1)
        write(b"x")


def bomb(write: Callable[[bytes], object]) -> None:
    write(HEADERS + b"\r\n" + gzip.compress(bytes(20_000_000)))


def words_for_a_terminal(write: Callable[[bytes], object]) -> None:
    write(b"HTTP/1.0 404 \x1b]0;title\x07\x1b[2Jgone\r\n\r\n")


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (endless, "more than 70,536 bytes came, and the file has fewer"),
        (drops_of_content, "not done after 1 s"),
        (drops_of_headers, "not done after 1 s"),
        (bomb, "file-0.gz holds more than the 5,000 bytes of file-0"),
        (words_for_a_terminal, "404 Client Error: ?]0;title??[2Jgone"),
    ],
)
def test_a_server_can_fill_no_disk_and_keep_nobody_waiting(
    script, tmp_path: Path, capsys, answer: Callable[[Callable[[bytes], object]], None], found: str
) -> None:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            with contextlib.suppress(OSError):
                answer(self.request.sendall)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        deadline_s = "1" if "not done" in found else "300"
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        mirror = ["--mirror", url, "--retries", "0", "--deadline-s", deadline_s]
        with pytest.raises(SystemExit):
            script.main(["--data-dir", str(tmp_path / "d"), *mirror])
        server.shutdown()
    assert found in capsys.readouterr().err
    assert not list(data.raw_folder(tmp_path / "d").iterdir())


def test_offline_it_says_how_to_bring_the_files(script, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        script.main(["--data-dir", str(tmp_path), "--mirror", dead_url(), "--retries", "0"])
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert "Connection refused" in message
    assert "--from FOLDER" in message


@pytest.mark.parametrize("packed", [True, False])
def test_takes_files_that_were_brought_by_hand(script, tmp_path: Path, packed: bool) -> None:
    source = tmp_path / "brought by hand"
    source.mkdir()
    for name, content in CONTENTS.items():
        (source / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)
    assert script.main(["--data-dir", str(tmp_path / "d"), "--from", str(source)]) == 0
    assert_complete(tmp_path / "d")


def test_a_folder_without_them_is_named(script, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        script.main(["--data-dir", str(tmp_path / "d"), "--from", str(tmp_path)])
    assert "neither file-0 nor file-0.gz is there" in capsys.readouterr().err


def test_two_at_once_are_no_trouble(script, mirror, tmp_path: Path) -> None:
    arguments = ["--data-dir", str(tmp_path / "d"), "--mirror", mirror.url]
    statuses: list[int] = []
    threads = [threading.Thread(target=lambda: statuses.append(script.main(arguments))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [0, 0, 0]
    assert_complete(tmp_path / "d")


def test_a_folder_that_cannot_be_written_is_named(script, mirror, tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        script.main(["--data-dir", str(tmp_path / "file"), "--mirror", mirror.url])
    assert "--data-dir PATH" in capsys.readouterr().err


def test_digits_need_no_download(script, capsys) -> None:
    assert script.main(["--dataset", "digits"]) == 0
    assert "--dataset digits" in capsys.readouterr().out


def test_the_script_runs_as_a_script() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "--from FOLDER" in done.stdout


@pytest.mark.full
def test_torchvision_reads_what_it_brings_and_the_resident_path_has_the_same_pixels(tmp_path: Path) -> None:
    """The real MNIST, from the folder that MNIST_FROM names: every test image as torchvision's transforms have it."""
    from torchvision.datasets import MNIST
    from torchvision.transforms import Compose, Normalize, ToTensor

    source = os.environ.get("MNIST_FROM", "")
    if not source and not os.environ.get("CI"):
        pytest.skip("MNIST_FROM names no folder with MNIST's files")
    subprocess.run([sys.executable, str(SCRIPT), "--data-dir", str(tmp_path), "--from", source], check=True)
    train, test = data.load("mnist", tmp_path)
    theirs = MNIST(tmp_path, download=False)
    assert torch.equal(train.tensors[0], theirs.data)
    assert torch.equal(train.tensors[1], theirs.targets)

    mean, std = data.MNIST_STATISTICS
    transform = Compose([ToTensor(), Normalize(mean, std)])
    loader = DataLoader(MNIST(tmp_path, train=False, download=False, transform=transform), batch_size=64)
    world = World(topology=Topology.from_environ({}), device=torch.device("cpu"))
    batches = list(zip(world.shard(test, batch_size=64), loader, strict=True))
    assert len(batches) == 157
    assert all(torch.equal(ours[0], images) and torch.equal(ours[1], labels) for ours, (images, labels) in batches)
