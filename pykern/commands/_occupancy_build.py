"""Kernels that must be compiled first: CUDA source, PTX, and pykern's own ops."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pykern.analysis import ptxas
from pykern.analysis.cubin import read_cubin
from pykern.analysis.kernel import KernelFacts
from pykern.analysis.occupancy_sources import Case, Given, Reading, case_of, read_file
from pykern.errors import ArgumentError, BuildError, ToolchainError
from pykern.jit.resources import base_name, own_name

TIMEOUT_S = 600


@dataclass(frozen=True)
class Source:
    """How to compile a .cu or .cuh file."""

    path: str
    arch: str
    defines: tuple[str, ...] = ()
    includes: tuple[str, ...] = ()
    instances: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


def sm_name(text: str) -> str:
    """``sm_90a`` from ``90a``, ``9.0``, ``sm_90a`` or ``compute_90a``; an ill-formed one is an error."""
    match = re.fullmatch(r"(?:sm_|compute_)?(\d{1,2})\.?(\d)([af]?)", text.strip())
    if not match:
        raise ArgumentError("--arch", text, "an architecture such as 9.0, 90a or sm_90a")
    return f"sm_{match[1]}{match[2]}{match[3]}"


def compile_source(source: Source) -> Reading:
    """Compile CUDA source to a cubin and read it, with nvcc or, where there is none, NVRTC. Raises BuildError
    with the compiler's words, ToolchainError where there is no compiler."""
    image = cubin_of_source(source)
    kernels = read_cubin(image, source.path)
    if not kernels:
        allowed = "a source with a __global__ function; a template needs --instance 'kernel<float, 4>'"
        raise ArgumentError(f"{source.path}: nothing was compiled", "no kernel", allowed)
    return Reading([replace(kernel, target=sm_name(source.arch)) for kernel in kernels])


def cubin_of_source(source: Source) -> bytes:
    """The cubin of a CUDA source."""
    from pykern.jit import toolchain

    path = Path(source.path)
    if not path.is_file():
        raise ArgumentError(source.path, "no such file", "a .cu or .cuh file")
    text = _translation_unit(path, source.instances)
    try:
        nvcc = toolchain.find_cuda().nvcc
    except ToolchainError as no_nvcc:
        return _nvrtc(text, source, no_nvcc)
    with tempfile.TemporaryDirectory(prefix="pykern-occupancy-") as folder:
        unit, out = Path(folder) / "unit.cu", Path(folder) / "out.cubin"
        unit.write_text(text, encoding="utf-8")
        _run([str(nvcc), "-cubin", *_compile_options(source), *source.flags, "-o", str(out), str(unit)], source.path)
        return out.read_bytes()


def _translation_unit(path: Path, instances: Sequence[str]) -> str:
    """Include the source and name each instance in a host function, which makes the compiler emit it."""
    lines = [f'#include "{path.resolve().as_posix()}"', "namespace pk {}", "using namespace pk;"]
    for number, instance in enumerate(instances):
        if not instance.strip() or any(character in instance for character in "\n;{}#"):
            raise ArgumentError("--instance", repr(instance), "a kernel with its arguments: 'softmax_warp<float, 4>'")
        lines.append(f"const void* pykern_instance_{number}() {{ return (const void*)({instance}); }}")
    return "\n".join(lines) + "\n"


def _kernel_sources() -> list[str]:
    from pykern.jit import sources

    try:
        return [str(sources.root())]
    except FileNotFoundError:
        return []


def _run(command: list[str], what: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{what}: {Path(command[0]).name} took longer than {TIMEOUT_S} s") from None
    log = done.stdout + done.stderr
    if done.returncode:
        first = next((line for line in log.splitlines() if "error" in line or "fatal" in line), log[:300])
        raise BuildError(f"{what}: {first.strip()}", log=log, command=" ".join(command))
    return log


def _nvrtc(text: str, source: Source, no_nvcc: ToolchainError) -> bytes:
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        raise ToolchainError(f"{no_nvcc}; nor is NVRTC here (pip install cuda-bindings nvidia-cuda-nvrtc)") from None
    # NVRTC compiles device code only: instances are named as expressions instead of in a host function.
    unit = "\n".join(line for line in text.splitlines() if "pykern_instance_" not in line)
    options = [option for option in _compile_options(source) if option != "-O3"]
    options += ["--device-as-default-execution-space"]

    def call(function: Any, *args: Any) -> Any:
        code, *rest = function(*args)
        if int(code):
            log = ""
            if function is nvrtc.nvrtcCompileProgram:
                buffer = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
                nvrtc.nvrtcGetProgramLog(program, buffer)
                log = buffer.decode("utf-8", "replace").strip("\0 \n")
            first = next((line for line in log.splitlines() if "error" in line), log[:300]) or str(code)
            raise BuildError(f"{source.path}: NVRTC: {first}", log=log)
        return rest[0] if rest else None

    program = call(nvrtc.nvrtcCreateProgram, unit.encode(), b"unit.cu", 0, [], [])
    for instance in source.instances:
        call(nvrtc.nvrtcAddNameExpression, program, instance.encode())
    encoded = [option.encode() for option in (*options, *source.flags)]
    call(nvrtc.nvrtcCompileProgram, program, len(encoded), encoded)
    image = b" " * call(nvrtc.nvrtcGetCUBINSize, program)
    call(nvrtc.nvrtcGetCUBIN, program, image)
    return image


def assemble_ptx(path: str, facts: list[KernelFacts], arch: str | None) -> Reading:
    """Facts of a PTX file, assembled where ptxas is found; without it as they are, with a remark."""
    from pykern.jit import toolchain

    try:
        assembler = toolchain.find_cuda().nvcc.with_name("ptxas")
    except ToolchainError:
        return Reading(facts, [f"{path}: registers and spills are decided by ptxas, which was not found"])
    if not assembler.is_file():
        return Reading(facts, [f"{path}: registers and spills are decided by ptxas; there is none at {assembler}"])
    target = sm_name(arch) if arch else facts[0].target or "sm_80"
    with tempfile.TemporaryDirectory(prefix="pykern-occupancy-") as folder:
        out = Path(folder) / "out.cubin"
        log = _run([str(assembler), "-v", f"-arch={target}", "-o", str(out), path], path)
        compiled = {kernel.name: kernel for kernel in read_cubin(out.read_bytes(), path)}
    said = {kernel.name: kernel for kernel in ptxas.read_ptxas_log(log, path)}
    merged = []
    for kernel in facts:
        found = compiled.get(kernel.name)
        if found is None:
            continue
        spills = said.get(kernel.name, found)
        merged.append(
            replace(
                found, target=target, min_blocks=kernel.min_blocks,
                spill_stores=spills.spill_stores, spill_loads=spills.spill_loads, notes=(),
            )
        )  # fmt: skip
    return Reading(merged)


# --- launch bounds tried out -------------------------------------------------------------------------------


def try_launch_bounds(
    source: Source | str, name: str, target: str, threads: int, blocks: Sequence[int]
) -> dict[int, KernelFacts]:
    """What ``__launch_bounds__(threads, b)`` really gives for each ``b`` of ``blocks``: registers and spills.

    ``source`` is CUDA source or the path of a PTX file; it is compiled to PTX once and assembled for each bound.
    Needs nvcc's ptxas, no GPU. Raises BuildError, ToolchainError.
    """
    from pykern.jit import toolchain

    cuda = toolchain.find_cuda()
    assembler = str(cuda.nvcc.with_name("ptxas"))
    with tempfile.TemporaryDirectory(prefix="pykern-occupancy-") as folder:
        ptx, out = Path(folder) / "unit.ptx", Path(folder) / "out.cubin"
        if isinstance(source, str):
            ptx, label = Path(source), source
        else:
            label, unit = source.path, Path(folder) / "unit.cu"
            unit.write_text(_translation_unit(Path(source.path), source.instances), encoding="utf-8")
            _run([str(cuda.nvcc), "-ptx", *_compile_options(source), "-o", str(ptx), str(unit)], label)
        text, bounded, found = ptx.read_text(encoding="utf-8"), Path(folder) / "bounded.ptx", {}
        for count in blocks:
            bounded.write_text(ptxas.with_launch_bounds(text, name, threads, count), encoding="utf-8")
            log = _run([assembler, "-v", f"-arch={target}", "-e", name, "-o", str(out), str(bounded)], label)
            said = {kernel.name: kernel for kernel in ptxas.read_ptxas_log(log, label)}
            found[count] = said[name]
        return found


def _compile_options(source: Source) -> list[str]:
    includes = [*source.includes, str(Path(source.path).resolve().parent), *_kernel_sources()]
    options = [f"-arch={sm_name(source.arch)}", "-std=c++17", "-O3", *(f"-D{define}" for define in source.defines)]
    return options + [f"-I{folder}" for folder in includes]


# --- shipped ops -------------------------------------------------------------------------------------------


def op_cases(name: str, shape: str, dtype: str, arch: str, given: Given) -> tuple[list[Case], str]:
    """A case for every launch of op ``name`` on a problem, compiled for ``arch`` (needs nvcc, no GPU), and what
    the plan says of itself. ``shape``: see :func:`problem_values`."""
    from pykern import op as registry
    from pykern.jit import build
    from pykern.plan import TARGETS, Launch

    found = registry.get(name)
    number = sm_name(arch).removeprefix("sm_")
    if number not in TARGETS:
        raise ArgumentError("--arch", arch, ", ".join(TARGETS))
    problem = found.problem(problem_values(found, shape, dtype))
    plan = found.planned(problem, TARGETS[number])
    cases = []
    for launch in plan.launches:
        grid, block, cluster = (Launch.triple(value) for value in (launch.grid, launch.block, launch.cluster))
        compiled = build.compile_only(launch.source, launch.kernel, number)
        threads = block[0] * block[1] * block[2]
        numbers = replace(given, threads=given.threads or threads)
        if given.dyn_smem is None:
            numbers = replace(numbers, dyn_smem=launch.smem)
        case = case_of(facts_of(compiled.path, launch.kernel), numbers)
        blocks, size = grid[0] * grid[1] * grid[2], cluster[0] * cluster[1] * cluster[2]
        cases.append(replace(case, name=launch.kernel, grid=blocks, cluster=size if size > 1 else None))
    why = f"{name} {plan.variant}: " + "; ".join(plan.why)
    return cases, why


def facts_of(library: Path, instance: str) -> KernelFacts:
    """Facts of the kernel ``instance`` in the library of its variant, which holds its file's plain kernels, too."""
    kernels = read_file(str(library)).kernels
    return next((kernel for kernel in kernels if base_name(kernel.name) == own_name(instance)), kernels[0])


def problem_values(op: Any, shape: str, dtype: str) -> dict[str, Any]:
    """Metadata of an op's arguments from text.

    ``shape`` is the first tensor's (``4096x4096``), named shapes (``x=4096x4096,w=1024x4096``), or sizes by
    dimension name (``m=16,n=1024,k=4096``); scalars may be given the same way (``log=true``). A required tensor that
    is left out gets its shape from the dimensions the others bind.
    """
    from pykern.schema import Tensor, TensorInfo, bind_dims, contiguous_strides, dtype_name, evaluate

    tensors = [spec for spec in op.inputs if isinstance(spec, Tensor)]
    scalars = {spec.name: spec for spec in op.inputs if not isinstance(spec, Tensor)}
    shapes: dict[str, tuple[int, ...]] = {}
    dims: dict[str, int] = {}
    values: dict[str, Any] = {}
    axes = {name for t in tensors for name in re.findall(r"[A-Za-z_]\w*", t.dims)}
    for item in filter(None, (part.strip() for part in shape.split(","))):
        name, equals, text = item.partition("=")
        if not equals:
            name, text = next((t.name for t in tensors if t.name not in shapes), ""), item
        if name in shapes or name in values or name in dims:
            raise ArgumentError("--shape", shape, f"one value for {name}")
        if name in {t.name for t in tensors}:
            shapes[name] = _sizes(text)
        elif name in scalars:
            values[name] = _scalar(scalars[name], text)
        elif name in axes and len(_sizes(text)) == 1:
            dims[name] = _sizes(text)[0]
        else:
            known = ", ".join([*(t.name for t in tensors), *sorted(axes), *scalars])
            raise ArgumentError("--shape", item, f"tensors, sizes and scalars of {op.name}: {known}")
    bound: dict[str, Any] = dict(dims)
    starred: dict[str, tuple[Any, ...]] = {}
    for spec in tensors:
        if spec.name in shapes:
            bind_dims(spec.name, spec.dims, shapes[spec.name], bound, starred)
    for spec in tensors:
        if spec.name not in shapes and not spec.optional:
            try:
                shapes[spec.name] = tuple(evaluate(token.lstrip("*"), bound) for token in spec.dims.split())
            except (KeyError, ValueError):
                names = ", ".join(f"{t.name} [{t.dims}]{' (optional)' if t.optional else ''}" for t in tensors)
                raise ArgumentError("--shape", shape or "nothing", f"sizes for {op.name}: {names}") from None
    wanted = dtype_name(dtype)
    for spec in tensors:
        if spec.name in shapes:
            kind = wanted
            if not isinstance(spec.dtypes, str) and wanted not in spec.dtypes:
                kind = spec.dtypes[0] if spec is not tensors[0] else wanted
            size = shapes[spec.name]
            values[spec.name] = TensorInfo(kind, size, contiguous_strides(size))
    return values


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        raise ArgumentError("--shape", text, "sizes joined by x, such as 4096x4096") from None
    if min(sizes) < 0 or max(sizes) >= 2**63:
        raise ArgumentError("--shape", text, "sizes of 0 or more, below 2**63")
    return sizes


def _scalar(spec: Any, text: str) -> Any:
    try:
        if spec.type == "bool":
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return {"int": int, "float": float, "str": str}[spec.type](text)
    except (KeyError, ValueError):
        raise ArgumentError(f"--shape {spec.name}", text, f"a {spec.type}") from None
