"""What is checked before a job is submitted.

preflight             runs all checks
feasibility           whether the cluster has what the job asks for
performance_warnings  what would run, but worse than it could
exposed_tokens        secrets in what a submission keeps
"""
