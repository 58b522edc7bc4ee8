"""How the ranks end when one of them fails.

error_report  the first exception, printed once, with its rank and host
peer_watch    ends a rank when another one has failed
hard_exit     ends this process where Python's own way out would wait for ever
"""
