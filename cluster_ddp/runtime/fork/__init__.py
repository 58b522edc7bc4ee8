"""`--launcher fork`: one process a node imports torch once, then becomes its ranks.

__main__   `python -m cluster_ddp.runtime.fork`
target     the script or module that each rank runs
preload    what is imported before
affinity   which CPUs a rank gets
rank_exit  what a rank does in the end
agent      watches the ranks: signals, failures, exit status
"""
