"""A seed that imports nothing before it forks, for tests of all else; `start` lets an agent use it."""

from __future__ import annotations

from cluster_ddp.runtime.fork import forked_program, seed

AGENT = (
    "import sys; from cluster_ddp.agent import __main__ as agent; from cluster_ddp.agent.task import seed_process;"
    "seed_process.MODULE = 'torchless_seed'; from cluster_ddp.agent.supervision import supervisor;"
    "supervisor.Supervisor.__init__.__kwdefaults__['patience_s'] = 1.0; agent.run()"
)
"""The code of an agent that uses it, and kills soon."""


def main() -> None:
    """Fork what the agent asks for."""
    forked_program.MODULES = ()  # type: ignore[assignment]
    forked_program._why_not = lambda: ""
    forked_program.reinit_after_fork = lambda cpus: None
    seed.main()
