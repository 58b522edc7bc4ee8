"""A cluster that is reached by ssh: a verb with --on HOST[:FOLDER] runs there, in the project's copy.

host          a machine behind ssh: commands, and what it has
project       the copy of the project on it, which `submit` brings up to date first
remote_verbs  --on: which verb runs there
"""
