"""Every analysis on one page that needs no network; the same program as ``pykern report``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pykern.analysis._cli import run_tool
from pykern.commands.report import command

if __name__ == "__main__":
    run_tool(command)
