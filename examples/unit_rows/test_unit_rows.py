from unit_rows import op

from pykern.testing import check_laws


def test_laws() -> None:
    check_laws(op)
