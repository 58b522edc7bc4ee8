"""How the ranks of one run find each other, and no other run's ranks.

store           `meet`: rank 0 serves a store, and all ranks join it
port_discovery  tells those who prove to be of the run the port of rank 0's store
arrived_ranks   the ranks that have arrived, and which are missing
run_label       the name of a run outside Slurm, the same on all ranks and over restarts
host_setup      what a host gives to a rendezvous: addresses, an interface, ports, open files
"""
