"""The host build accesses memory in the widths nvcc emits, so that the checker's traffic is the GPU's.

One instance of every shipped kernel is compiled both ways; see _ptx.py. What a kernel may do otherwise is listed in
KNOWN, by the text of the line.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path

import _ptx
import pytest
from _native import CUDA_SRC, nvcc

from pykern import op
from pykern.plan import host_target

PRELUDE = '#include "core/vec.cuh"\n#include "core/export.cuh"\n#line 1 "planted.cuh"\n'

# (file, part of the line) -> why it may stay. All of them move a few bytes of shared memory, and none of a tensor.
KNOWN = {
    (
        "attention_decode.cuh",
        "items[index % count_items]",
    ): "an item of the schedule, written once by one lane",
    ("attention_decode.cuh", "= item."): "fields of that item, which nvcc reads in pairs",
    ("sample.cuh", "smem.prefix"): "a digit's result: two words, written by one thread and read by all",
    ("sample.cuh", "smem.before"): "the same",
}


def planted(body: str, tmp_path: Path) -> list[tuple[int, str]]:
    source = f"""{PRELUDE}struct Smem {{ float a[128]; }};
__global__ void k(const float* __restrict__ x, float* __restrict__ y) {{
  PK_SMEM(Smem, s);
{body}
}}
PK_VARIANT(k)
"""
    return [(m.line, m.kind) for m in _ptx.mismatches(source, tmp_path, ("planted.cuh",))]


@pytest.mark.nvcc
def test_planted_mismatches_are_found(tmp_path: Path) -> None:
    """Line 4: members of a float4. Line 7: four shared reads that nvcc merges. Line 8: a struct assignment."""
    body = """  const float4* v = reinterpret_cast<const float4*>(x) + threadIdx.x; const float t = v->x - v->y * v->z;
  for (int i = 0; i < 4; ++i) s.a[32 * i + threadIdx.x] = t + i;
  __syncthreads();
  const float* p = s.a + 4 * (31 - threadIdx.x); const float sum = p[0] + p[1] * 2.f + p[2] * 3.f + p[3] * 4.f;
  reinterpret_cast<float4*>(y)[threadIdx.x] = make_float4(sum, t, 1.f, 2.f);"""
    assert planted(body, tmp_path) == [(4, "load"), (7, "load"), (8, "store")]


@pytest.mark.nvcc
def test_the_vector_helpers_agree(tmp_path: Path) -> None:
    body = """  const pk::Vec<float, 4> v = pk::ld_vec_stream<float, 4>(x + 4 * threadIdx.x);
  pk::st_vec(s.a + 4 * threadIdx.x, v);
  __syncthreads();
  const pk::Vec<float, 4> w = pk::ld_vec<float, 4>(s.a + 4 * (31 - threadIdx.x));
  pk::st_vec(y + 4 * threadIdx.x, w);
  y[128 + threadIdx.x] = w[0] + x[128 + 32 * threadIdx.x];"""
    assert planted(body, tmp_path) == []


def test_a_split_access_is_found_too() -> None:
    """nvcc narrower than the host: 16 bytes there, 4 and 8 with nvcc."""
    ptx = {("a/k.cuh", 3): _ptx.Widths({4, 8}, set()), ("a/k.cuh", 4): _ptx.Widths({4}, {16})}
    host = {("b/k.cuh", 3): _ptx.Widths({16}, set()), ("b/k.cuh", 4): _ptx.Widths({4, 8}, {16})}
    assert [(m.line, m.kind) for m in _ptx.compare(ptx, host)] == [(3, "load")]


@pytest.mark.nvcc
def test_the_ptx_reader_sees_what_is_there() -> None:
    """Widths, spaces and the chain of inlined functions, on PTX whose accesses are known."""
    source = f"""{PRELUDE}struct Smem {{ pk::bf16 a[256]; }};
template <class T> PK_DEVICE T twice(const T* p) {{
  return pk::ld(p);
}}
__global__ void k(const pk::Vec<pk::bf16, 8>* x, const double* d, unsigned char* y, int n) {{
  PK_SMEM(Smem, s);
  pk::st_vec(s.a + 8 * threadIdx.x, twice(x + threadIdx.x));
  __syncthreads();
  y[threadIdx.x] = static_cast<unsigned char>(s.a[n].bits);
  reinterpret_cast<double*>(y)[9] = twice(d);
}}
PK_VARIANT(k)
"""
    ptx = nvcc(source, "-arch=sm_90a", "-lineinfo", "-ptx", suffix=".ptx").read_text()
    seen = {line: w for (_, line), w in _ptx.ptx_widths(ptx, ("planted.cuh",)).items()}
    assert seen[3].load == {16, 8} and not seen[3].store
    assert seen[7].store == {16}
    assert seen[9].load == {2} and seen[9].store == {1}
    assert seen[10].store == {8}


# ---- shipped kernels


@functools.cache
def kernels() -> dict[str, tuple[str, str]]:
    """One instance of every kernel template that a plan can choose: name -> (source, instance)."""
    instances: dict[tuple[str, str], set[str]] = {}
    for each, _, plan in op.sample_plans(host_target(), op.names()):
        for launch in plan.launches:
            name = launch.kernel.split("<")[0]
            instances.setdefault((launch.source or each.source, name), set()).add(launch.kernel)
    # The middle one is of a 16-bit type, whose vectors are the longest.
    return {name: (source, sorted(all_)[len(all_) // 2]) for (source, name), all_ in instances.items()}


def closure(path: str, seen: dict[str, str]) -> dict[str, str]:
    if path not in seen:
        seen[path] = (CUDA_SRC / path).read_text()
        for name in re.findall(r'#include "([^"]+)"', seen[path]):
            if (CUDA_SRC / name).exists():
                closure(name, seen)
    return seen


def cached_mismatches(source: str, instance: str, tmp_path: Path) -> list[_ptx.Mismatch]:
    """Kept between runs under the contents of everything included, as a cold look at all kernels takes a minute."""
    text = f'#include "{source}"\n#include "core/export.cuh"\nnamespace pk {{ PK_VARIANT({instance}) }}\n'
    parts = {
        "": text,
        "_ptx": Path(_ptx.__file__).read_text(),
        **closure(source, {}),
        **closure("core/export.cuh", {}),
    }
    parts |= closure("host/device.h", {}) | closure("core/gpu/gpu.cuh", {})
    key = hashlib.sha256(json.dumps(sorted(parts.items())).encode()).hexdigest()[:24]
    cache = Path(tempfile.gettempdir()) / f"pykern-access-widths-{os.getuid()}" / f"{key}.json"
    if not cache.exists():
        own = [p for p in parts if p.startswith("ops/")]
        own += ["core/row.cuh", "core/block.cuh", "core/quant.cuh", "core/epilogue.cuh"]
        found = _ptx.mismatches(text, tmp_path, own)
        cache.parent.mkdir(exist_ok=True)
        partial = cache.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps([vars(m) for m in found]))
        partial.replace(cache)
    return [
        _ptx.Mismatch(m["file"], m["line"], m["kind"], tuple(m["nvcc"]), tuple(m["host"]))
        for m in json.loads(cache.read_text())
    ]


def excused(mismatch: _ptx.Mismatch) -> bool:
    paths = [p for p in CUDA_SRC.rglob(mismatch.file) if p.parent.name in ("ops", "core")]
    text = paths[0].read_text().splitlines()[mismatch.line - 1] if paths else ""
    return any(mismatch.file == file and part in text for file, part in KNOWN)


def test_known_lines_still_exist() -> None:
    for file, part in KNOWN:
        assert part in (CUDA_SRC / "ops" / file).read_text(), (
            f"{file} has no line with {part!r} any more: drop it"
        )


@pytest.mark.nvcc
@pytest.mark.parametrize("name", sorted(kernels()))
def test_shipped_kernels(name: str, tmp_path: Path) -> None:
    source, instance = kernels()[name]
    found = [m for m in cached_mismatches(source, instance, tmp_path) if not excused(m)]
    assert not found, "\n".join(["use pk::ld/pk::st on a pk::Vec:", *map(str, found)])
