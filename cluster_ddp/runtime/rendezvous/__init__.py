"""How the ranks of one run find each other, and nobody else's.

store      `meet`: rank 0 serves a store, all others join it, and all are there
beacon     by which rank 0 tells on which port
names      addresses, without waiting for name servers that do not answer
rollcall   who is missing, by rank and host
"""

from cluster_ddp.runtime.rendezvous.store import DEFAULT_TIMEOUT_S, meet

__all__ = ["DEFAULT_TIMEOUT_S", "meet"]
