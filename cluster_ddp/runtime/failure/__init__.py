"""How the ranks end when one of them fails or hangs.

error_report   the first exception, printed once, with its rank and host
peer_watch     ends a rank when another rank has failed
hang_watch     says where all ranks are when no step completes; may end the start
hang_answers   where each rank is, by the ranks' store or by their stack files
hang_verdict   the answers in words
stacks         where a process is, by its stack: of this rank, in its stack file, of its loaders' workers
stack_timer    lets the main thread write its stack after a time, also when it is stuck in C
sick_nodes     who may accuse a node, and the notes in sick-nodes.txt
last_progress  how far this rank is, and when it last progressed
"""
