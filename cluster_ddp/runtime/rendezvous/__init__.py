"""How the ranks of one run find each other, and nobody else's.

store      `meet`: rank 0 serves a store, all others join it, and all are there
beacon     by which rank 0 tells on which port
secret     by which the ranks of one run know each other
dns        addresses, without waiting for name servers that do not answer
arrivals   who is missing, by rank and host
network_interface   which one leads to the other ranks
open_files          how many connections this process may have
"""

from cluster_ddp.runtime.rendezvous.store import DEFAULT_TIMEOUT_S, meet

__all__ = ["DEFAULT_TIMEOUT_S", "meet"]
