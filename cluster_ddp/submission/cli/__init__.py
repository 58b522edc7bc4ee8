"""The command line of a submission: its options, the site's settings, the warnings."""

from __future__ import annotations

from typing import Any


def add_on(group: Any) -> None:
    """Add --on to a parser or a group of it: the option of all verbs that also run on another machine (`remote`)."""
    text = "the cluster, reached by ssh; the project's copy is there in FOLDER (default: cluster_ddp/NAME)"
    group.add_argument("--on", metavar="HOST[:FOLDER]", help=text)
