"""The command line of a submission: its options, the site's settings, the warnings.

command_line        from the words to a plan, with warnings
options             an option for each field of JobSpec, and those of the submission itself
option_mistakes     options that were probably meant otherwise, such as those of sbatch
activated_env       the environment that is activated in the shell, if it is not cluster-ddp's own
site_config         cluster.toml: its keys and profiles
settings_file       its content, refused if others could have written it
first_cluster_toml  the one that `cluster-ddp init` writes
"""

from __future__ import annotations

from typing import Any


def add_on(group: Any) -> None:
    """Add --on to a parser or a group of it: the option of all verbs that also run on another machine (`remote`)."""
    text = "the cluster, reached by ssh; the project's copy is there in FOLDER (default: cluster_ddp/NAME)"
    group.add_argument("--on", metavar="HOST[:FOLDER]", help=text)
