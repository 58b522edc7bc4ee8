"""`--launcher fork`: one process per node imports torch once, then forks the ranks. And what restarts need of that.

__main__           `python -m cluster_ddp.runtime.fork`
forked_program     the modules imported before the fork, and the script or module that each rank runs
rank_environments  the variables of every rank of a node
warm_rank          `--restarts`: a process that has imported them, and becomes a rank
"""
