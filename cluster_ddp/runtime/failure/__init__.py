"""How the ranks end when one of them fails.

error_report   the first exception, printed once, with its rank and host
peer_watch     ends a rank when another rank has failed
hard_exit      ends this process if Python's normal exit would wait forever
hang_watch     says where all ranks are when no step completes
rank_progress  when this rank last got on
hang_answers   where all ranks are, as far as this one can know
hang_verdict   the same in words: who waits in which collective
sick_nodes     nodes that were found at fault
stacks         where a process is, in the user's code
stack_file     stacks by faulthandler, also when a rank is stuck in C
torch_log      what torch's C++ code logs
"""
