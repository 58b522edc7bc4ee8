"""How the ranks of one run find each other, and no other run's ranks.

store               `meet`: rank 0 serves a store, and all ranks join it
beacon              tells the other ranks the port of rank 0's store
secret              proves that a rank belongs to the run
dns                 addresses, without waiting for name servers that do not answer
arrivals            the ranks that are missing, with their hosts
network_interface   the interface that leads to the other ranks
open_files          the limit on open files, and so on connections
"""
