"""What limits a kernel's occupancy and what to change; the same program as ``pykern occupancy``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pykern.analysis._cli import run_tool
from pykern.commands.occupancy import command

if __name__ == "__main__":
    run_tool(command)
