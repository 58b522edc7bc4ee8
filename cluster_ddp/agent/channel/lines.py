"""The sealed lines of the channel, see the package; and the key of a job, which seals them.

The key is made of the job's secret: those who have it prove that they belong to the job. The job has a new secret at
each start, and its tasks get it in their environment. No process sends it: others see only HMACs, each for one purpose.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Mapping
from typing import Any

from cluster_ddp.protocol import Env

Message = dict[str, Any]
"""What is said: it has a `kind`."""

LONGEST_LINE = 1 << 20
CHUNK = 1 << 16
SEND_S = 5.0
"""How long a message may take to be sent, where the other side does not read."""


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

    def derived(self, purpose: str) -> Key:
        """Return a key for one purpose. It proves nothing to those who use the key for another one."""
        return Key(self._key, purpose)

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


class Lines:
    """The lines of a connection, as one side writes and reads them."""

    def __init__(self, key: Key, nonces: bytes, own: str, other: str) -> None:
        self._key, self._nonces, self._own, self._other = key, nonces, own, other
        self._written = self._read = 0

    def seal(self, message: Message) -> bytes:
        """Return the line of a message."""
        text = json.dumps(message).encode()
        self._written += 1
        return self._key.mac(self._own, self._nonces, b"%d" % self._written, text) + b" " + text + b"\n"

    def open(self, line: bytes) -> Message:
        """Return the message of a line.

        Raises:
            ValueError: the line is not sealed with the key, or out of order.
        """
        mac, _, text = line.partition(b" ")
        self._read += 1
        if not self._key.proves(mac, self._other, self._nonces, b"%d" % self._read, text):
            raise ValueError("a line that is not sealed")
        return dict(json.loads(text))


def new_nonce() -> bytes:
    """Return what a side begins with: so nobody can repeat what was said on another connection."""
    return os.urandom(16).hex().encode()
