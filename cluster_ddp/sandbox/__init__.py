"""A real multi-node Slurm on one machine, to try jobs on before queueing for hours.

Every node is a network namespace with its own address, hostname and slurmd; so is the controller. GPUs are gres over
dummy devices. All of a sandbox's state is in one folder, and its name or number in every name that it makes, so that
several sandboxes and a Slurm already on the machine don't disturb each other.

    layout    names, addresses and paths of a sandbox, all derived from its name and index
    network   bridge, namespaces, links
    config    slurm.conf and its companions
    cluster   up, down, status
    packages  what must be installed, and installing it
    faults    what breaks, made for real; disk: a small file system that can be full or stand still
    releases  other releases of Slurm, unpacked beside the system's

Start it with `cluster-ddp sandbox up`.
"""
