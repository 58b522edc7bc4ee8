"""The limit on open files of this process."""

from __future__ import annotations

import resource

_ENOUGH = 65_536


def raise_limit() -> None:
    """Raise the soft limit (often 1,024) to 65,536, or to the hard limit: each connection takes a descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(_ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
