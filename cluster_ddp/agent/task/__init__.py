"""Around each rank, on its node: it starts the rank's command, keeps it, and tells the job how it ended.

task              starts and keeps the ranks of a task
node_ranks        what each of a node's ranks gets, if one task starts them all
rank_command      the command of a rank, also in containers
python_module     modules that its Python runs for us, found without the working folder
orders            what the job tells a task, and a spare node
supervisor        the one supervisor of processes
signals           which signals are passed on, who can take one, and those that wait for that
no_process_group  whether a rank trains alone
seed_process      a process that has imported torch, and forks ranks
staged_env        the environment that a node has unpacked
spawn             a command's start
"""
