"""Sectors, bank conflicts and the fix of an access pattern; the same program as ``pykern coalescing``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pykern.analysis._cli import run_tool
from pykern.commands.coalescing import command

if __name__ == "__main__":
    run_tool(command)
