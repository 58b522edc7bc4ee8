"""The command line of a submission: its options, a site's settings, and what is said about it."""
