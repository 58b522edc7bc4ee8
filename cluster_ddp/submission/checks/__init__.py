"""What is checked before a job is submitted.

preflight             runs all checks but that of a site's template
program               the program of a command, and the script that it names
feasibility           whether the cluster has what the job asks for
performance_warnings  what would run, but worse than it could
exposed_tokens        secrets in what a submission keeps
nested_launchers      commands that start ranks themselves
site_template         a site's own template: it renders, and asks for the same tasks and GPUs
"""
