"""A real multi-node Slurm on one machine, to try jobs on before queueing for hours.

Every node is a network namespace with its own address, hostname and slurmd; so is the controller. GPUs are gres over
dummy devices. All of a sandbox's state is in one folder. Each name that it makes on the machine has its name or index
in it, so several sandboxes, and a Slurm that is already on the machine, don't disturb each other.

    layout    names, addresses and paths of a sandbox, all derived from its name and index
    network   bridge, namespaces, links
    config    slurm.conf and its companions
    cluster   up, down, status
    keeper    a process that ends a sandbox with the process that wants it
    claims    which names and subnets are taken
    packages  what must be installed, and installing it
    releases  other releases of Slurm, unpacked beside the system's

Start it with `cluster-ddp sandbox up`.
"""
