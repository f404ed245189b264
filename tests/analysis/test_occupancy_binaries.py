"""Cubins, fat binaries, host objects, PTX and ptxas text: the same facts from each; damaged files are refused."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykern.analysis import cubin, decompress, fatbin, ptxas, zstd
from pykern.analysis.elf import Elf
from pykern.analysis.kernel import KernelFacts
from pykern.analysis.occupancy_sources import Given, case_of, loadable_image, read_bytes, read_file, select
from pykern.errors import ArgumentError, PykernError

FILES = Path(__file__).parents[1] / "data" / "occupancy"
NAMES = {"plain", "bounded", "barriers16", "barriers5", "dynamic", "spills", "local_array", "clustered"}
CUBINS = ["sm_75", "sm_80", "sm_90a", "sm_100", "sm_120", "cuda12_sm_90a"]


def kernels(name: str) -> dict[str, KernelFacts]:
    return {kernel.name: kernel for kernel in read_file(str(FILES / name)).kernels}


@pytest.mark.parametrize("name", CUBINS)
def test_a_cubin_says_what_ptxas_said(name: str) -> None:
    binary, log = kernels(f"{name}.cubin"), kernels(f"{name}.log")
    assert set(binary) == set(log) == NAMES
    for kernel in NAMES:
        ours, theirs = binary[kernel], log[kernel]
        assert (ours.regs, ours.static_smem, ours.cc, ours.target) == (
            theirs.regs,
            theirs.static_smem,
            theirs.cc,
            theirs.target,
        )
        assert ours.frame == theirs.frame
        if theirs.barriers is not None:  # CUDA 12's ptxas does not print them
            assert ours.barriers == theirs.barriers
        if ours.spills is not None:  # CUDA 12's cubins do not mark them
            assert (ours.spill_stores, ours.spill_loads) == (theirs.spill_stores, theirs.spill_loads)
        else:
            assert name.startswith("cuda12") and kernel in ("spills", "local_array") and ours.notes


@pytest.mark.parametrize("name", CUBINS)
def test_what_the_source_says(name: str) -> None:
    found = kernels(f"{name}.cubin")
    assert found["bounded"].static_smem == 1344  # 333 floats, rounded to 16; never the reserved 1024
    assert found["bounded"].max_threads == 256 and found["spills"].max_threads == 1024
    assert (found["barriers16"].barriers, found["barriers5"].barriers) == (16, 5)
    assert (found["plain"].barriers, found["bounded"].barriers) == (0, 1)
    assert found["dynamic"].static_smem == found["plain"].static_smem == 0
    if not name.startswith("cuda12"):
        two_blocks_fit = name not in ("sm_75", "sm_120")  # elsewhere ptxas drops "2 blocks of 1024" and nothing spills
        assert bool(found["spills"].spills) == two_blocks_fit and found["local_array"].spills == 0
    assert found["local_array"].local_stores and not found["plain"].local_stores
    newer = name not in ("sm_75", "sm_80")
    assert found["clustered"].cluster == ((2, 2, 1) if newer else None)


def test_the_reserved_kilobyte_is_subtracted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cubin, "RESERVED_SMEM", 0)
    assert kernels("sm_90a.cubin")["bounded"].static_smem == 1344 + 1024
    assert kernels("sm_80.cubin")["bounded"].static_smem == 1344  # before sm_90 the section holds the variables alone


@pytest.mark.parametrize("name", ["none", "size", "speed"])
def test_fat_binaries_of_every_compression(name: str) -> None:
    found = read_file(str(FILES / f"{name}.fatbin"))
    assert not found.remarks
    by_cc: dict[str | None, dict[str, KernelFacts]] = {}
    for kernel in found.kernels:
        by_cc.setdefault(kernel.cc, {})[kernel.name] = kernel
    assert set(by_cc) == {"8.0", "9.0"}
    for cc, single in (("8.0", "sm_80.cubin"), ("9.0", "sm_90a.cubin")):
        expected = kernels(single)
        for kernel in NAMES:
            ours = replace(by_cc[cc][kernel], origin="")
            assert ours == replace(expected[kernel], origin="")


def test_ptx_inside_a_fat_binary_is_whole() -> None:
    images = {
        name: list(fatbin.images((FILES / f"{name}.fatbin").read_bytes(), name)) for name in ("none", "size", "speed")
    }
    texts = {
        name: next(image.data for image in found if image.kind == "ptx").rstrip(b"\0") for name, found in images.items()
    }
    assert texts["none"] == texts["size"] == texts["speed"]


def test_a_host_library() -> None:
    found = kernels("host.so")
    expected = kernels("sm_80.cubin")
    assert {n: replace(k, origin="") for n, k in found.items()} == {
        n: replace(k, origin="") for n, k in expected.items()
    }
    assert Elf(loadable_image(str(FILES / "host.so"), "8.0")).machine == 190
    with pytest.raises(ArgumentError, match=r"a host object with code for 9\.0"):
        loadable_image(str(FILES / "host.so"), "9.0")


def test_ptx_without_ptxas() -> None:
    found, compiled = kernels("kernels.ptx"), kernels("sm_90a.cubin")
    for name in NAMES:
        ptx, real = found[name], compiled[name]
        assert ptx.regs is None and ptx.spills is None
        assert (ptx.static_smem, ptx.barriers, ptx.max_threads, ptx.cluster) == (
            real.static_smem, real.barriers, real.max_threads, real.cluster,
        )  # fmt: skip
    assert found["bounded"].min_blocks == 4
    with pytest.raises(ArgumentError, match=r"registers of plain .*--regs N, or ptxas"):
        case_of(found["plain"], Given(threads=128))
    assert case_of(found["plain"], Given(threads=128, regs=20)).config.regs == 20


def test_old_and_new_wordings_of_ptxas() -> None:
    text = """ptxas info    : Compiling entry function '_Z1kPf' for 'sm_80'
ptxas info    : Function properties for _Z1kPf
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, 2 barriers, 4096+16 bytes smem, 364 bytes cmem[0], 8 bytes lmem
ptxas info    : Function properties for _Z6helperv
    64 bytes stack frame, 99 bytes spill stores, 99 bytes spill loads
"""
    (kernel,) = ptxas.read_ptxas_log(text, "log")
    assert (kernel.regs, kernel.barriers, kernel.static_smem) == (40, 2, 4112)
    assert (kernel.frame, kernel.spill_stores, kernel.spill_loads) == (8, 4, 12)


# --- questions from facts ----------------------------------------------------------------------------------------


def test_assumptions_are_written_down() -> None:
    found = kernels("sm_90a.cubin")
    case = case_of(found["plain"], Given())
    assert case.config.threads == 256 and any("256 threads a block assumed" in text for text in case.assumed)
    assert any("no dynamic shared memory assumed" in text for text in case.assumed)
    assert not case_of(found["plain"], Given(threads=64, dyn_smem=0)).assumed
    assert case_of(found["spills"], Given()).config.threads == 1024
    with pytest.raises(ArgumentError, match=r"threads: got 512, allowed: at most 256, the launch bound of bounded"):
        case_of(found["bounded"], Given(threads=512))


def test_selection_lists_what_there_is() -> None:
    found = read_file(str(FILES / "size.fatbin")).kernels
    assert len(select(found, "barriers", ["9.0"])) == 2
    with pytest.raises(ArgumentError, match=r"--kernel: got nothere, allowed: part of barriers16"):
        select(found, "nothere", None)
    with pytest.raises(ArgumentError, match=r"--cc: got 7\.5, allowed: code for 8\.0, 9\.0"):
        select(found, None, ["7.5"])


# --- damaged input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "an empty file"),
        (b"hello", "a file that starts with b'hello'"),
        (b"\x7fELF", "another kind of ELF"),
        (b"\x7fELF" + b"\x01\x01" + bytes(60), "another kind of ELF"),
        (b"\x50\xed\x55\xba", "ends inside a container header"),
        (b"\x50\xed\x55\xba\x01\x00\x10\x00" + (1 << 40).to_bytes(8, "little"), "truncated fat binary"),
        (b".version 9.0\n.target sm_90\n", "PTX without a kernel"),
        (b"ptxas info : Compiling entry function 'k' for 'sm_90'\n", "without a compiled kernel"),
    ],
)
def test_what_is_no_kernel_file(data: bytes, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        read_bytes(data, "x.bin")
    assert message in str(caught.value) and "x.bin" in str(caught.value)


def test_a_host_program_without_device_code() -> None:
    with pytest.raises(ArgumentError, match="an ELF file without device code"):
        read_file("/proc/self/exe")


@pytest.mark.parametrize(
    "name",
    ["sm_90a.cubin", "cuda12_sm_90a.cubin", "size.fatbin", "speed.fatbin", "host.so", "kernels.ptx", "sm_80.log"],
)
def test_damaged_files_never_crash(name: str) -> None:
    data, rng = (FILES / name).read_bytes(), random.Random(zlib.crc32(name.encode()))
    for _ in range(60):
        broken = bytearray(data)
        for _ in range(rng.choice((1, 3, 30))):
            # most hits go to the headers, where they matter
            at = rng.randrange(min(len(broken), 4096)) if rng.random() < 0.7 else rng.randrange(len(broken))
            broken[at] = rng.randrange(256)
        if rng.random() < 0.4:
            broken = broken[: rng.randrange(len(broken))]
        try:
            for kernel in read_bytes(bytes(broken), name).kernels:
                case_of(kernel, Given(regs=32))
        except PykernError:
            pass


@given(st.binary(max_size=400))
def test_random_bytes_never_crash(data: bytes) -> None:
    for prefix in (b"", b"\x7fELF\x02\x01", b"\x50\xed\x55\xba\x01\x00\x10\x00", b"\x28\xb5\x2f\xfd"):
        try:
            read_bytes(prefix + data, "x")
        except ArgumentError:
            pass


# --- decompression -------------------------------------------------------------------------------------------------

TEXT = b"".join(b"line %d of %d\n" % (i, i * i) for i in range(40))


def test_zstd_raw_and_run_blocks() -> None:
    magic = b"\x28\xb5\x2f\xfd"
    frame = (
        magic
        + b"\x00\x00"
        + (5 << 3 | 0).to_bytes(3, "little")
        + b"hello"
        + (7 << 3 | 1 << 1 | 1).to_bytes(3, "little")
        + b"x"
    )
    assert decompress.zstd(frame, 12) == b"hello" + b"x" * 7
    with pytest.raises(decompress.Corrupt):
        decompress.zstd(frame, 11)
    with pytest.raises(decompress.Corrupt):
        decompress.zstd(frame[:-1], 12)


def test_lz4_blocks() -> None:
    block = bytes([0x51]) + b"abcde" + (5).to_bytes(2, "little") + bytes([0x30]) + b"xyz"
    assert decompress.lz4_block(block, 13) == b"abcde" + b"abcde" + b"xyz"
    overlap = bytes([0x1F]) + b"a" + (1).to_bytes(2, "little") + bytes([10]) + bytes([0x00])
    assert decompress.lz4_block(overlap, 30) == b"a" * 30
    for broken in (block[:3], block[:-1], bytes([0x11]) + b"a" + (9).to_bytes(2, "little"), b"\xff"):
        with pytest.raises(decompress.Corrupt):
            decompress.lz4_block(broken, 13)


def test_sizes_of_a_corrupt_header_allocate_nothing() -> None:
    for function in (decompress.zstd, decompress.lz4_block):
        with pytest.raises(decompress.Corrupt, match="decompressed size"):
            function(b"\x28\xb5\x2f\xfd", 1 << 60)


def test_our_zstd_against_the_library() -> None:
    """Every level, checksums and unknown sizes; skipped where no Zstandard library is installed."""
    zstandard = pytest.importorskip("zstandard")
    rng = random.Random(7)
    ptx = (FILES / "kernels.ptx").read_bytes()
    elf = (FILES / "sm_80.cubin").read_bytes()
    for level in (-5, 1, 3, 9, 19):
        for data in (ptx, elf, TEXT, b"", b"\0" * 200_000, rng.randbytes(3000), rng.randbytes(9) * 40_000):
            packed = zstandard.ZstdCompressor(
                level=level, write_checksum=level > 3, write_content_size=level < 9
            ).compress(data)
            assert zstd.decode_frames(packed, len(data)) == data


def test_an_unknown_scheme_is_named() -> None:
    data = bytearray((FILES / "size.fatbin").read_bytes())
    first_flags = 16 + 40
    assert int.from_bytes(data[first_flags : first_flags + 8], "little") & 0x8000
    data[first_flags + 1] = 0x10  # flag 0x1000 instead of Zstandard's 0x8000
    found = read_bytes(bytes(data), "x.fatbin")
    (remark,) = found.remarks
    assert "packed with the scheme of flag 0x1000, which is not known here" in remark
    assert {kernel.cc for kernel in found.kernels} < {"8.0", "9.0"}
