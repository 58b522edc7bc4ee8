"""Why a job would hang, said in seconds; and where a job that hung was.

    findings           what a check has found, how findings of several ranks become one, and what the doctor says
    checks/            tier 1: what each node and rank checks alone
    step/              the doctor in the tasks of a step, tier by tier
    login_node_checks  the checks of a login node
    hang_autopsy       where the ranks of a run hung

Until tier 3 it needs only the standard library: a sick node may lack everything else.
"""
