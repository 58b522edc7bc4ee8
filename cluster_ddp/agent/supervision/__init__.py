"""Commands and their ends, for the job's agent and for the tasks': one process keeps them, and passes signals on.

supervisor  keeps commands: passes signals on, ends what stays too long, says how each ended
signals     which signals are passed on, who can take one, and those that wait for that
spawn       a command's start
"""
