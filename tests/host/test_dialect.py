"""docs/dialect.md against the headers: its example runs, and it names everything that core offers."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from _native import CUDA_SRC, nvcc

from .harness import Kernel, aligned, copy_of, launch, out

DOC = (Path(__file__).resolve().parents[2] / "docs" / "dialect.md").read_text()
EXAMPLE = re.findall(r"```cpp\n(.*?)```", DOC, re.S)[0]


def public_names() -> set[str]:
    """Functions, types, constants and macros of core; namespaces detail and cvt are its own business."""
    names: set[str] = set()
    for path in [*CUDA_SRC.glob("core/*.cuh"), *CUDA_SRC.glob("core/gpu/*.cuh")]:
        text = re.sub(r"//(?! namespace)[^\n]*", "", path.read_text())
        text = re.sub(r"namespace (detail|cvt) \{.*?\}  // namespace \1", "", text, flags=re.S)
        names |= set(re.findall(r"^PK_DEVICE [^(;={]*?(\w+)(?:<\w+>)?\(", text, re.M))
        names |= set(re.findall(r"^(?:struct|enum class)(?: alignas\(.*\))? (\w+)", text, re.M))
        names |= set(re.findall(r"^constexpr \w+ (\w+)", text, re.M))
        names |= set(re.findall(r"^#define (PK_(?!WGMMA)\w+)\(", text, re.M))
    return names


def test_every_name_is_documented() -> None:
    names = public_names()
    assert {"ld", "warp_sum", "wgmma", "mbar_wait", "Vec", "kFullMask", "PK_SMEM", "decode_q4_1"} <= names
    documented = set(re.findall(r"\w+", DOC))
    assert not names - documented, sorted(names - documented)


def test_the_page_names_nothing_that_is_gone() -> None:
    code = "".join(p.read_text() for p in CUDA_SRC.glob("core/**/*.cuh"))
    for name in set(
        re.findall(r"`((?:mbar|tma|cluster|wgmma|cp_async|unpack|decode|ld|st|warp|block)_\w+)", DOC)
    ):
        assert re.search(rf"\b{name}\b", code), name


@pytest.mark.parametrize("name,dtype", [("float", torch.float32), ("pk::bf16", torch.bfloat16)])
def test_the_example_runs(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, 1024, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide = torch.float32 if dtype == torch.float32 else torch.int16
    y = aligned((3, 1024), np.float32 if dtype == torch.float32 else np.int16)
    kernel = Kernel(EXAMPLE, f"scale_by_sum<{name}>", check=True)
    launch(kernel, 3, 256 if dtype == torch.float32 else 128, copy_of(x.view(wide).numpy()), out(y))
    got = torch.from_numpy(y).view(dtype).double()
    want = x.double() * x.double().sum(1, keepdim=True)
    assert not ((got - want).abs() > 2.0**-8 * want.abs() + 1e-3).any()


@pytest.mark.nvcc
def test_the_example_compiles_with_nvcc() -> None:
    source = f"{EXAMPLE}\ntemplate __global__ void scale_by_sum<pk::half>(const pk::half*, pk::half*);\n"
    assert "ld.global.nc.v4.u32" in nvcc(source, "-arch=sm_80", "-ptx", suffix=".ptx").read_text()
