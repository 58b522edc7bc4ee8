"""How the ranks end when one of them fails.

error_report    the first exception, printed once, with its rank and host
peer_watch      ends a rank when another rank has failed
hard_exit       ends this process if Python's normal exit would wait forever
"""
