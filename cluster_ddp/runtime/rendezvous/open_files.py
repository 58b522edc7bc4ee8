"""How many files this process may open."""

from __future__ import annotations

import resource

_ENOUGH = 65_536


def raise_limit() -> None:
    """Raise the limit, 1,024 by default, as far as the system lets us: strangers' connections take descriptors, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(_ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
