"""Every law, for every op, on every backend and architecture this machine can run."""

from __future__ import annotations

import pytest

from pykern import op as ops
from pykern.testing.laws import DRAWN, LAWS, Where, check_law

PLACES = [Where("host", "80"), Where("host", "90a"), Where("host", "120")]
EXAMPLES = {"checker_is_silent": 6, "same_bits_every_run": 8, "writes_every_output": 16, "row_alone_and_in_batch": 10}


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", ops.names())
def test_law_on_the_host(name: str, law: str, place: Where) -> None:
    # Plans differ little between architectures: the full count on one, a few examples on the others.
    examples = EXAMPLES.get(law) if place.arch == "90a" else 3
    check_law(ops.get(name), law, place, examples if law in DRAWN else None)


@pytest.mark.gpu
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", ops.names())
def test_law_on_the_gpu(name: str, law: str) -> None:
    check_law(ops.get(name), law, Where("cuda", ""), None)
