"""Around each rank, on its node: it starts the rank's command, keeps it, and tells the job how it ended.

start         the command of a task, for three launchers
orders        what the job tells a task: to end its command, to start it again
spare         on a node that takes no ranks yet
predecessors  ranks of earlier starts, which must end first
keeper        the one supervisor of processes
on_the_way    signals that wait until a command can take them
spawn         starts a command as a shell would
signals       which signals are passed on, and who can take one
alone         whether a rank trains alone
warm          a process that has imported torch, and becomes the next rank
containers    Apptainer's and Pyxis' options
staging       the environment that a node has unpacked
"""
