"""What follows a failure: whether, where and with which nodes the ranks are started again.

verdict   what follows, as a pure function
recovery  which nodes are lost or at fault, and with which the ranks start again
nodes     the nodes of the allocation: which train, which are spares, which are left out
spares    what is known of the spare nodes
standby   a step whose agents wait for the next start, with torch imported
fence     takes the run directory away from an older start
history   failures.jsonl: how each failed start ended, and what followed
"""
