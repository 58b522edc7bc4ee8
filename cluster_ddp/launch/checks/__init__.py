"""What is checked before a job is submitted.

preflight             all of it, in order
feasibility           whether the cluster has what the job asks for
performance_warnings  what would run, and yet not as well as it could
exposed_tokens        secrets in what a submission keeps
"""
