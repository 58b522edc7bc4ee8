"""Why a job would hang, said in seconds; and where a job that hung was.

    finding       what a check has found, and how findings of several ranks become one verdict
    checks/       what each node and rank checks alone, one module for each group
    isolated      runs checks in processes that can be killed
    place         which rank this is, also where the environment does not say it
    exchange      how the ranks' reports reach rank 0: by TCP, or by files where that fails
    compare       what only all reports together show
    links         tier 2: connections between nodes
    training      tiers 3 and 4: collectives, and a step of DDP
    ranks         the doctor in the ranks of a step, tier by tier
    login         the checks of a login node
    autopsy       where the ranks of a run hung

It imports `slurm` and `runtime`. Until tier 3 it needs only the standard library: a sick node may lack everything else.
"""
