"""The command line of a submission: its options, the site's settings, the warnings."""
