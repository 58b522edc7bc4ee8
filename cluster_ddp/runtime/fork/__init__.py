"""Ranks that are forked by a process that has imported torch: in each node's task, and for restarts.

seed            that process
forked_program  the modules that it imports, and the script or module that each rank runs
"""
