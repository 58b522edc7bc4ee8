"""The key of a job, made of its secret: those who have it prove that they belong to the job.

The job has a new secret at each start, and its tasks get it in their environment. No process sends it: others see only
HMACs, each for one purpose.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping

from cluster_ddp.protocol import Env


class Key:
    """A key made of a secret.

    Args:
        secret: the job's secret; if empty, anybody can compute the key.
        run: a text that differs between those who share a secret but not the key.
    """

    def __init__(self, secret: bytes, run: str = "") -> None:
        self.is_secret = bool(secret)
        """Whether it is made of a secret."""
        self._key = hmac.digest(secret, run.encode(), "sha256")

    @staticmethod
    def of_job(env: Mapping[str, str]) -> Key:
        """Return the key of the job that an environment belongs to, by its `Env.SECRET`."""
        return Key(os.fsencode(env.get(Env.SECRET, "")))

    def mac(self, purpose: str, *parts: bytes) -> bytes:
        """Return the HMAC-SHA256 of some parts for a purpose, in hexadecimal digits.

        Args:
            purpose: so that an HMAC for one purpose is useless for another.
            parts: only the last one may contain line breaks.
        """
        return hmac.digest(self._key, b"\n".join([purpose.encode(), *parts]), "sha256").hex().encode()

    def proves(self, mac: bytes, purpose: str, *parts: bytes) -> bool:
        """Return whether `mac` is the HMAC of the parts for the purpose, in constant time."""
        return hmac.compare_digest(mac, self.mac(purpose, *parts))
