"""What is checked before a job is submitted.

preflight         runs all checks but that of a site's template
command_mistakes  commands that start ranks themselves, no such program or script, words that only a shell reads
script_mistakes   syntax errors of a script, variables of Slurm that have no value
job_environment   modules, environments, images, and the packages of the job's Python
feasibility       whether the cluster has what the job asks for
account_limits    whether its partition takes jobs of the account, and whether that may have all jobs of a chain
job_warnings      what would run, but worse than it could; secrets; run directories that others can replace
site_template     a site's own template: it renders, and asks for the same tasks and GPUs
"""
