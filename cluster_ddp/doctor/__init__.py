"""Why a job would hang, said in seconds; and where a job that hung was.

    finding     what a check has found, and how findings of several ranks become one
    verdict     what the doctor says
    checks/     tier 1: what each node and rank checks alone, one module for each group
    step/       the doctor in the tasks of a step, tier by tier
    isolated    runs checks in processes that can be killed
    login       the checks of a login node
    submitted   the doctor as a job of its own
    autopsy     where the ranks of a run hung

It imports `slurm` and `runtime`. Until tier 3 it needs only the standard library: a sick node may lack everything else.
"""
