"""How the ranks of one run find each other, and no other run's ranks.

store           `meet`: rank 0 serves a store, and all ranks join it
port_discovery  tells the other ranks the port of rank 0's store
run_key         proves that a rank belongs to the run
arrived_ranks   the ranks that have arrived, and which are missing
host_network    addresses, the interface that leads to the other ranks, the limit on open files
first_rank      an error that all ranks have is said once
"""
