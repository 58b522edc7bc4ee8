"""On each node: starts the commands of a task's ranks, keeps them, and tells the job how they ended.

task              starts and keeps the ranks of a task
node_ranks        what each of a node's ranks gets, if one task starts them all
rank_command      the command of a rank, also in containers
python_module     modules that its Python runs for us, found without the working folder
orders            what the job tells a task, and a spare node
no_process_group  whether a rank trains alone
seed_process      a process that has imported torch, and forks ranks
staged_env        the environment that a node has unpacked
"""
