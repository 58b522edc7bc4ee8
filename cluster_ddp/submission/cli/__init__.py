"""The command line of a submission: its options, the site's settings, the warnings.

submit_command      a submission by command line: from the words to a plan, with warnings
options             an option for each field of JobSpec, and those of the submission; what was meant otherwise
activated_env       the environment that is activated in the shell, if it is not cluster-ddp's own
settings_files      cluster.toml, the project's and the user's, with their profiles; who else could have written it
settings_keys       their keys: types, and what each value is as a field of a job
"""
