"""Make a picture of a report's page: `python scripts/screenshot_report.py RUN… [--image docs/images/report.png]`.

RUN is a run directory. It needs Chromium, without a screen.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from cluster_ddp.errors import DataError, exit_on_error
from cluster_ddp.jobs.report import page
from cluster_ddp.jobs.report.summary import report
from cluster_ddp.jobs.status import run_statuses

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> int:
    """Parse the options, write the page, take the picture. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories")
    parser.add_argument("--image", type=Path, default=Path("docs/images/report.png"), help="default: %(default)s")
    parser.add_argument("--size", default="1200x1500", help="width x height in pixels (default: %(default)s)")
    parser.add_argument("--dark", action="store_true", help="for a dark screen")
    arguments = parser.parse_args()
    with exit_on_error("screenshot_report.py"):
        browser = next(filter(None, map(shutil.which, BROWSERS)), None)
        if browser is None:
            raise DataError("A picture of a report:", "there is no Chromium on the PATH.", "apt install chromium")
        reports = [report(status) for status in run_statuses(Path("runs"), arguments.runs)]
        with tempfile.TemporaryDirectory() as folder:
            page.write(Path(folder, "report.html"), reports)
            arguments.image.parent.mkdir(parents=True, exist_ok=True)
            words = ["--headless=new", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={folder}/profile"]
            words += ["--virtual-time-budget=3000", f"--window-size={arguments.size.replace('x', ',')}"]
            words += ["--blink-settings=preferredColorScheme=0"] if arguments.dark else []
            picture = f"--screenshot={arguments.image.resolve()}"
            subprocess.run([browser, *words, picture, Path(folder, "report.html").as_uri()], check=True, timeout=120)
    return 0


if __name__ == "__main__":
    sys.exit(main())
