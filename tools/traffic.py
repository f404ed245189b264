"""What fusing a chain of operations saves, and from which batch on; the same program as ``pykern traffic``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pykern.analysis._cli import run_tool
from pykern.commands.traffic import command

if __name__ == "__main__":
    run_tool(command)
