"""Around each rank, on its node: it starts the rank's command, keeps it, and tells the job how it ended.

start       the command of a task, for three launchers
keeper      the one supervisor of processes
signals     which signals are passed on, and who can take one
alone       whether a rank trains alone
memory      whether the kernel has killed a process for memory
containers  Apptainer's and Pyxis' options
staging     the environment that a node has unpacked
"""
