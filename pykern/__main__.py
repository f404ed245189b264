"""``python -m pykern`` is the ``pykern`` command."""

from pykern.cli import main

main(prog_name="pykern")
