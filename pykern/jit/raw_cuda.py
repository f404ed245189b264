"""Raw kernels on CUDA tensors: NVRTC through ``cuda.core``, else nvcc; launched through the driver."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pykern.errors import ArgumentError, BuildError, CaptureError, KernelError, ToolchainError
from pykern.jit import build, diagnose, extension, raw, sources, toolchain
from pykern.jit.target import cuda_target

if TYPE_CHECKING:
    from pykern.jit.raw import RawKernel

_MAX_DYNAMIC_SMEM, _NON_PORTABLE_CLUSTER = 8, 14  # CUfunction_attribute
_ATTRIBUTE_COOPERATIVE, _ATTRIBUTE_CLUSTER = 2, 4  # CUlaunchAttributeID
_PORTABLE_CLUSTER = 8


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint32 * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("smem", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint32),
    ]


def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ToolchainError(f"no CUDA driver: {error}") from error


def _check(driver: ctypes.CDLL, code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        raise KernelError(f"{what}: {(text.value or b'unknown error').decode()} (CUDA error {code})")


def has_nvrtc() -> bool:
    """Whether ``cuda.core`` is installed, and the NVRTC library that it loads."""
    try:
        _nvrtc()
        from cuda.bindings import nvrtc

        return not int(nvrtc.nvrtcVersion()[0])
    except Exception:  # an optional package: whatever is wrong with it, nvcc is there
        return False


def _nvrtc() -> tuple[Any, Any]:
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError:
        from cuda.core.experimental import Program, ProgramOptions
    return Program, ProgramOptions


def compile_nvrtc(kernel: RawKernel, arch: str) -> tuple[bytes, str]:
    """(cubin, mangled name) by NVRTC; needs neither driver nor GPU. Raises BuildError with the first error."""
    Program, ProgramOptions = _nvrtc()
    source = kernel.source
    folders = [str(source.path.parent), str(sources.root())]
    try:
        cuda = toolchain.find_cuda()
        folders += [
            str(folder) for folder in (cuda.home / "include", cuda.home / "include" / "cccl") if folder.is_dir()
        ]
    except ToolchainError:
        pass  # core/ needs no toolkit header; a kernel that does will say so
    defines = [flag[2:] for flag in source.flags if flag.startswith("-D")]
    if len(defines) != len(source.flags):
        raise ArgumentError("flags", repr(source.flags), "-D definitions only, where NVRTC compiles")
    macros = [tuple(text.split("=", 1)) if "=" in text else text for text in defines]
    options = ProgramOptions(
        name=source.path.name, arch=f"sm_{arch}", std="c++17", lineinfo=True, include_path=folders,
        define_macro=macros or None,
    )  # fmt: skip
    instance, own = kernel.qualified, source.path.read_text(encoding="utf-8")
    text = "".join(f'#include "{header}"\n' for header in raw.NVRTC_PRELUDE)
    text += f'#line 1 "{source.path.name}"\n{own}\n'
    text += f'#line 1 "{diagnose.AFTER}"\n{extension.MARK}\n{kernel.assertion}\n'
    try:
        code = Program(text, "c++", options).compile("cubin", name_expressions=(instance,))
    except Exception as error:  # its exception class moved between releases
        found = diagnose.of_sources(str(error), {source.path.name: own}, after=1)
        raise BuildError(f"{kernel.instance}: {found}", log=str(error)) from error
    names = getattr(code, "symbol_mapping", None) or getattr(code, "_sym_map", {})
    mangled = names.get(instance, instance)
    return bytes(code.code), mangled.decode() if isinstance(mangled, bytes) else mangled


_lock = threading.Lock()
_Known = tuple[dict[str, sources.Stat | None], dict[str, bytes], ctypes.c_void_p]  # stats, contents, CUfunction
_functions: dict[tuple[Any, ...], _Known] = {}


def function(kernel: RawKernel, index: int) -> ctypes.c_void_p:
    """The ``CUfunction`` of a kernel on device ``index``, compiled where need be; an edited file is noticed."""
    key = (kernel.source.path, kernel.instance, kernel.source.flags, index)
    known = _functions.get(key)
    if known is not None and sources.unchanged(known[0]):
        return known[2]
    with _lock:
        known = _functions.get(key)
        contents, stats = sources.walk(kernel.source.path, "cuda")
        if known is not None and known[1] == contents:
            _functions[key] = (stats, contents, known[2])
            return known[2]
        if extension.capturing():
            raise CaptureError(
                f"{kernel.instance} is not compiled yet and a CUDA graph is being captured: call its build() before"
            )
        made = _load(kernel, index)
        _functions[key] = (stats, contents, made)
        return made


def _load(kernel: RawKernel, index: int) -> ctypes.c_void_p:
    import torch

    arch = cuda_target(index).arch
    driver = _driver()
    made = ctypes.c_void_p()
    with torch.cuda.device(index):
        torch.cuda.current_stream(index).synchronize()  # makes the primary context, which the module belongs to
        if has_nvrtc():
            cubin, name = compile_nvrtc(kernel, arch)
            module = ctypes.c_void_p()
            _check(driver, driver.cuModuleLoadData(ctypes.byref(module), cubin), kernel.instance)
            _check(driver, driver.cuModuleGetFunction(ctypes.byref(made), module, name.encode()), kernel.instance)
            return made
        variant = build.variant(
            str(kernel.source.path), kernel.qualified, backend="cuda", arch=arch, extra_flags=kernel.source.flags,
            prelude=raw.PRELUDE, epilogue=kernel.assertion,
        )  # fmt: skip
        runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")  # the one torch has loaded
        code = runtime.cudaGetFuncBySymbol(ctypes.byref(made), ctypes.c_void_p(variant.entry))
        if code:
            raise KernelError(f"{kernel.instance}: cudaGetFuncBySymbol failed with CUDA error {code}")
        return made


def run(
    kernel: RawKernel,
    index: int,
    shape: tuple[tuple[int, int, int], tuple[int, int, int], tuple[int, int, int]],
    values: Sequence[Any],
    smem: int,
    cooperative: bool,
) -> None:
    """Launch on device ``index``'s current stream."""
    import torch

    target = cuda_target(index)
    if smem > target.smem_optin:
        raise ArgumentError("smem", smem, f"at most {target.smem_optin} bytes a block on this GPU")
    grid, block, cluster = shape
    blocks = cluster[0] * cluster[1] * cluster[2]
    if blocks > target.max_cluster:
        raise ArgumentError("cluster", cluster, f"at most {target.max_cluster} blocks on this GPU")
    made, driver = function(kernel, index), _driver()
    attributes = (_Attribute * 2)()
    count = 0
    if blocks > 1:
        attributes[count].id = _ATTRIBUTE_CLUSTER
        attributes[count].value[:3] = list(cluster)
        count += 1
    if cooperative:
        attributes[count].id = _ATTRIBUTE_COOPERATIVE
        attributes[count].value[0] = 1
        count += 1
    pointers = (ctypes.c_void_p * max(1, len(values)))(*(ctypes.addressof(value) for value in values))
    with torch.cuda.device(index):
        stream = torch.cuda.current_stream(index).cuda_stream
        if smem > 48 << 10:
            _check(driver, driver.cuFuncSetAttribute(made, _MAX_DYNAMIC_SMEM, smem), kernel.instance)
        if blocks > _PORTABLE_CLUSTER:
            _check(driver, driver.cuFuncSetAttribute(made, _NON_PORTABLE_CLUSTER, 1), kernel.instance)
        config = _Config(
            (ctypes.c_uint32 * 3)(*grid), (ctypes.c_uint32 * 3)(*block), smem, stream, attributes, count
        )  # fmt: skip
        _check(driver, driver.cuLaunchKernelEx(ctypes.byref(config), made, pointers, None), kernel.instance)
