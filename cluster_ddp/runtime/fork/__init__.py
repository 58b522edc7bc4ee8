"""`--launcher fork`: one process per node imports torch once, then forks the ranks.

__main__   `python -m cluster_ddp.runtime.fork`
target     the script or module that each rank runs
preload    the modules imported before the fork
affinity   the CPUs of a rank
rank_exit  how a rank ends
"""
