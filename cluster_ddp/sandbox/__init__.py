"""A real multi-node Slurm on one machine, to try jobs on before queueing for hours.

Every node is a network namespace with its own address, hostname and slurmd; so is the controller. GPUs are gres over
dummy devices. All of a sandbox's state is in one folder. Each name that it makes on the machine has its name or index
in it, so several sandboxes, and a Slurm that is already on the machine, don't disturb each other.

cluster         up, down, status; which names and subnets are taken; the end with the process that wants it
layout          names, addresses and paths of a sandbox, all derived from its name and index
slurm_conf      slurm.conf and its companions
network         bridge, namespaces, links
daemons         starts slurmctld and the others, and waits until they are of use
accounting      up --accounting: a database, accounts and limits
prerequisites   what must be installed, and installing it
slurm_download  other releases of Slurm, unpacked beside the system's

It imports nothing of the package but `slurm`, `errors`, `run.names` and `argument_parser`.
"""
