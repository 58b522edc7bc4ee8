"""Where other releases of Slurm are fetched from."""

from __future__ import annotations

import pytest

from cluster_ddp.sandbox import slurm_download

DEB822 = "Types: deb\n# http://old/debian\nURIs: http://mirror.example/pub/debian\nSuites: bookworm\n"
SECURITY = "Types: deb\nURIs: http://deb.debian.org/debian-security\n"


@pytest.mark.parametrize(
    ("sources", "mirror"),
    [
        ("deb http://mirror.example/debian/ trixie main\n", "http://mirror.example/debian"),
        ("deb [signed-by=/a.gpg arch=amd64] https://m.example/debian trixie main", "https://m.example/debian"),
        (f"{SECURITY}\n{DEB822}", "http://mirror.example/pub/debian"),
        (SECURITY, "http://deb.debian.org/debian"),
        ("# deb http://mirror.example/debian trixie main\n", "http://deb.debian.org/debian"),
        ("deb http://archive.ubuntu.com/ubuntu noble main\n", "http://deb.debian.org/debian"),
        ("", "http://deb.debian.org/debian"),
    ],
)
def test_the_mirror_is_the_machines_own(sources: str, mirror: str) -> None:
    assert slurm_download.mirror_in(sources) == mirror
