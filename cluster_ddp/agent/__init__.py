"""Starts the ranks of a job and says how they ended: on the batch host, around ranks, or on this machine.

Where it runs is where it stands: `job` on the batch host, or this machine; `task` on each node. A submission
freezes it into the run directory, so it needs the standard library only, of Python 3.9 or later, and of this package no
more than `submission.frozen.frozen_agent` lists.

job              on the batch host: the start of the ranks, their end, what follows
task             on each node, around its ranks
supervision      keeps commands, in both
__main__         `job`, `chain`, `task`, `rank`, `spare` and `unpack`
launch_options   the options of the ranks, of `cluster-ddp launch` and of the agent
launch_env       the environment of the ranks: MASTER_ADDR, MASTER_PORT, RANK …
array_values     the values of an array's tasks, and a command with them
command_program  what the Python interpreter or the shell of a command runs
channel          sealed lines between the tasks and the job, and the key that seals them: the side of a task
channel_server   the side of the job
rank_notes       what a rank leaves for the process around it: why it failed, that it was stopped, that it has joined
rank_end         how a rank ended, as the process around it says
first_failure    which rank failed first, and why: by what the tasks have told, else by logs
"""
