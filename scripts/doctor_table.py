"""Write the tables of the doctor's checks in docs/reference/doctor.md, from the checks themselves. `--check` compares.

A star marks those whose fault tests/slurm/doctor does not make for real.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "slurm" / "doctor")]

import doctor_faults  # type: ignore[import-not-found]  # noqa: E402
import generated_file  # noqa: E402

from cluster_ddp.doctor import login_node_checks  # noqa: E402
from cluster_ddp.doctor.checks import all_checks  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "doctor.md"
BEGIN, END = "<!-- begin: scripts/doctor_table.py -->\n", "<!-- end -->\n"
TIERS = {
    **all_checks.OF_RANK_0,
    "nodes": {**{check.name: check.detects for check in all_checks.ALL}, **all_checks.OF_RANK_0["nodes"]},
    "login node": login_node_checks.CHECKS,
}


def tables() -> str:
    """Return a table for each tier, as Markdown."""
    in_jobs = (*doctor_faults.IN_THE_BATCH_SHELL, *doctor_faults.AT_ONCE, *doctor_faults.NETWORK)
    lines = []
    for tier, checks in TIERS.items():
        made = {fault.check for fault in (doctor_faults.ON_A_LOGIN_NODE if tier == "login node" else in_jobs)}
        stars = {check: "" if check in made else r" \*" for check in checks}
        lines += ["", f"## {tier.capitalize()}", "", "| check | detects |", "| --- | --- |"]
        lines += [f"| `{check}`{stars[check]} | {detects} |" for check, detects in checks.items()]
    return "\n".join([*lines, "", ""])


def main() -> int:
    """Write or compare. Returns the exit status."""
    check = generated_file.only_compares(__doc__)
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    fresh = before + begin + tables() + end + after
    if generated_file.was_fresh(PAGE, fresh, check=check) or not check:
        return 0
    print(f"{PAGE.relative_to(ROOT)} differs from the checks. Hint: python scripts/doctor_table.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
