"""Hypothesis strategies and the laws every kernel must keep; public, so that people use them on their own kernels.

from pykern.testing import check_laws
check_laws(my_op)                       # every law, on every backend this machine has
"""

from __future__ import annotations

from pykern.testing.data import DrawFn, make_args, make_tensor, sizes, spikes, tensor_spec
from pykern.testing.laws import LAWS, check_laws

__all__ = ["LAWS", "DrawFn", "check_laws", "make_args", "make_tensor", "sizes", "spikes", "tensor_spec"]
