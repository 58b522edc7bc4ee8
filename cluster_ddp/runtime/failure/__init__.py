"""How the ranks end when one of them fails.

error_report    the first exception, printed once, with its rank and host
failure_marker  a file that says what failed first, for the end of the job's log
peer_watch      ends a rank when another rank has failed
hard_exit       ends this process if Python's normal exit would wait forever
"""
