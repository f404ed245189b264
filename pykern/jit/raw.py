"""Raw kernels in a script: CUDA C++ text or a ``.cuh`` file, launched on torch tensors.

    source = pykern.compile('''
    template <typename T>
    __global__ void scale(const T* x, T* y, int n, float a) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < n) y[i] = T(a * float(x[i]));
    }''')
    scale = source.kernel("scale<float>")
    scale[(n + 255) // 256, 256](x, y, n, 2.0)

CPU tensors run on the host backend, CUDA tensors through NVRTC (``cuda.core``) or, where that is not installed,
nvcc. Plain CUDA and the ``pk::`` dialect of ``core/`` both work; shared memory that is to run on the CPU too uses
``PK_SMEM`` / ``PK_DYN_SMEM``. Arguments are checked against the kernel's parameter list before the launch, and what was
read as that list is held against the compiler's view in the build.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pykern.errors import ArgumentError, BuildError, GradientError, brief
from pykern.jit import cache, declarations, signature, sources
from pykern.jit.declarations import Declaration
from pykern.jit.signature import Parameter

Dim = int | Sequence[int]
_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_BLOCK = (1024, 1024, 64)
_MAX_CLUSTER = (16, 16, 16)
MAX_THREADS = 1024
MAX_SMEM = 227 << 10  # of a block, on any card; the host backend's limit, too
# All that a kernel's text is compiled after, so that macros of the text change nothing in them.
PRELUDE = ("core/raw.cuh", "core/export.cuh")
HOST_PRELUDE = ("host/raw.h", *PRELUDE)
NVRTC_PRELUDE = PRELUDE[:1]


def compile(source: str, *, name: str = "kernel.cuh", flags: Sequence[str] = ()) -> RawSource:
    """Kernels from CUDA C++ text. ``flags`` are added to the compiler's (``-D``...); ``name`` is shown in errors.

    Nothing is compiled before the first launch or :meth:`RawKernel.build`. Raises ArgumentError where the text
    holds no ``__global__`` function.
    """
    if not isinstance(source, str):
        raise ArgumentError("source", brief(source), "CUDA C++ text (pykern.load takes a path)")
    if not isinstance(name, str) or not re.fullmatch(r"[\w+-][\w.+-]{0,99}", name):
        raise ArgumentError("name", brief(name), "a plain file name: letters, digits, . _ + -, at most 100")
    try:
        source.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError("source", f"text that is no UTF-8 ({error.reason})", "CUDA C++ text") from error
    flags = _flags(flags)
    # kept beside the builds, so that debuggers and the checker find the line that they name
    folder = cache.store() / ".raw" / hashlib.sha256(source.encode()).hexdigest()[:16]
    return RawSource(folder / name, flags, source)


def _write(path: Path, text: str) -> None:
    """Put ``text`` into the file ``path`` unless it is there. Raises BuildError where that cannot be done."""
    data = text.encode()
    try:
        if path.is_file() and path.read_bytes() == data:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        scratch.write_bytes(data)
        os.replace(scratch, path)
    except OSError as error:
        raise BuildError(f"{path.name}: the text cannot be written to the cache, {path.parent}: {error}") from error


def load(path: str | os.PathLike[str], *, flags: Sequence[str] = ()) -> RawSource:
    """Kernels from a file, which may include its neighbours and ``core/``. An edit is noticed at the next launch."""
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise ArgumentError("source", brief(path), "the path of a file (pykern.compile takes its text)")
    return RawSource(sources.locate(path).resolve(), _flags(flags))


def _flags(flags: Any) -> tuple[str, ...]:
    given = tuple(flags) if isinstance(flags, (tuple, list)) else None
    if given is None or not all(isinstance(flag, str) and flag.strip() and "\0" not in flag for flag in given):
        raise ArgumentError("flags", brief(flags), "a list of compiler flags, such as ['-DN=4']")
    return given


class RawSource:
    """A source of kernels; :meth:`kernel` picks one."""

    def __init__(self, path: Path, flags: Sequence[str] = (), text: str | None = None) -> None:
        self.path, self.flags, self.text = path, tuple(flags), text
        self.prints = False  # whether a kernel of it may print
        self._parsed: tuple[dict[str, sources.Stat | None], dict[str, tuple[Declaration, ...]]] | None = None
        if not self.declarations():
            shown = self.path.name if text is not None else str(path)
            allowed = "text with a __global__ function that no #if leaves out and no macro makes"
            raise ArgumentError("source", shown, allowed)

    def declarations(self) -> dict[str, tuple[Declaration, ...]]:
        """The ``__global__`` functions of this file by name; read again when the file changed.

        A text whose file was deleted with the cache is put back.
        """
        if self._parsed is None or not sources.unchanged(self._parsed[0]):
            if self.text is not None:
                _write(self.path, self.text)
            stat = sources.stat_of(self.path)
            try:
                text = self.path.read_text(encoding="utf-8")
            except (OSError, UnicodeError) as error:
                raise ArgumentError("source", repr(str(self.path)), f"a file of CUDA C++ text ({error})") from error
            self.prints = "printf" in text
            defines = [flag[2:] for flag in self.flags if flag.startswith("-D")]
            self._parsed = ({str(self.path): stat}, declarations.declarations(text, defines))
        return self._parsed[1]

    def kernel(self, instance: str) -> RawKernel:
        """One kernel, with its template arguments: ``kernel("scale")``, ``kernel("scale<float, 4>")``."""
        return RawKernel(self, instance)

    def __repr__(self) -> str:
        return f"RawSource({self.path.name}: {', '.join(self.declarations())})"


class _Read(NamedTuple):
    qualified: str
    parameters: tuple[Parameter, ...]
    assertion: str


class RawKernel:
    """A kernel instance. ``k[grid, block](*args)`` or ``k.launch(grid, block, *args, smem=..., cluster=...)``."""

    def __init__(self, source: RawSource, instance: str) -> None:
        if not isinstance(instance, str):
            raise ArgumentError("kernel", brief(instance), "its name and template arguments, like 'k<float, 4>'")
        self.source, self.instance = source, " ".join(instance.split())
        self._known: tuple[dict[str, tuple[Declaration, ...]], _Read] | None = None
        self.parameters  # noqa: B018  (an unknown kernel is refused here)

    def _read(self) -> _Read:
        """What the source says of the kernel now."""
        declared = self.source.declarations()
        if self._known is None or self._known[0] is not declared:
            written, arguments = signature.parse_instance(self.instance)
            name, found = _chosen(declared, written, arguments, self.instance)
            qualified = name + self.instance[len(written) :]
            if found.template and not arguments and "<" not in qualified:
                qualified += "<>"
            parameters = signature.parameters_of(found, arguments)
            kinds = ", ".join(["decltype(&" + qualified + ")", *(f"pk::detail::{one.checked}" for one in parameters)])
            shown = re.sub(r'["\\]', "'", f"{self.instance}({', '.join(map(str, parameters))})")
            assertion = f'static_assert(pk::detail::kTakes<{kinds}>, "pykern read {shown}");'
            self._known = (declared, _Read(qualified, parameters, assertion))
        return self._known[1]

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameter list, as it is in the source now."""
        return self._read().parameters

    @property
    def qualified(self) -> str:
        """The instance as it is named from outside all namespaces."""
        return self._read().qualified

    @property
    def assertion(self) -> str:
        """A declaration that compiles where the compiler sees the parameters that :attr:`parameters` says."""
        return self._read().assertion

    def __getitem__(self, geometry: tuple[Dim, Dim]) -> Callable[..., None]:
        """``k[grid, block]``; each an int or up to three."""
        if not isinstance(geometry, tuple) or len(geometry) != 2:
            raise ArgumentError("[grid, block]", brief(geometry), "two values, such as k[8, 256] or k[(8, 2), 128]")
        grid, block = geometry

        def call(*args: Any, **options: Any) -> None:
            self.launch(grid, block, *args, **options)

        return call

    def build(self, device: Any = "cpu", check: bool = False) -> None:
        """Compile for a device ahead of the first launch."""
        kind, index = _asked(device)
        if kind == "cpu":
            self._host(check)
        else:
            from pykern.jit import raw_cuda

            raw_cuda.function(self, index)

    def launch(
        self,
        grid: Dim,
        block: Dim,
        *args: Any,
        smem: int = 0,
        cluster: Dim | None = None,
        cooperative: bool = False,
        check: bool = False,
        seed: int = 0,
        device: Any = None,
    ) -> None:
        """Run the kernel on the tensors' device and its current stream.

        ``args`` follow the parameter list: tensors (or None, a null pointer) for pointers, numbers for scalars.
        ``smem``: bytes of dynamic shared memory, up to 232448. ``cluster``: blocks of a cluster. ``cooperative``: all
        blocks resident at once. ``check`` (CPU only): run under the checker; ``seed`` picks the schedule and when
        asynchronous copies land; findings raise CheckError. ``device``: where to run when no argument is a tensor.
        Raises ArgumentError for an argument that does not fit, KernelError when the launch fails, BuildError,
        CaptureError.
        """
        parameters = self.parameters
        if len(args) != len(parameters):
            shown = ", ".join(map(str, parameters)) or "no arguments"
            raise ArgumentError(f"{self.instance}: arguments", len(args), f"{len(parameters)}: ({shown})")
        shape = (
            _dims("grid", grid, _MAX_GRID),
            _dims("block", block, _MAX_BLOCK),
            _dims("cluster", 1 if cluster is None else cluster, _MAX_CLUSTER),
        )
        threads = shape[1][0] * shape[1][1] * shape[1][2]
        if threads > MAX_THREADS:
            raise ArgumentError("block", shape[1], f"at most {MAX_THREADS} threads, not {threads}")
        for axis, (blocks, group) in enumerate(zip(shape[0], shape[2])):
            if blocks % group:
                raise ArgumentError("cluster", shape[2], f"a divisor of the grid {shape[0]} on axis {'xyz'[axis]}")
        if isinstance(smem, bool) or not isinstance(smem, int) or not 0 <= smem <= MAX_SMEM:
            raise ArgumentError("smem", brief(smem), f"0 to {MAX_SMEM} bytes of dynamic shared memory")
        for name, flag in (("check", check), ("cooperative", cooperative)):
            if not isinstance(flag, bool):
                raise ArgumentError(name, brief(flag), "True or False")
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise ArgumentError("seed", brief(seed), "an int in 0..2**63-1")
        where = _where(parameters, args, device)
        values = [_value(parameter, value) for parameter, value in zip(parameters, args)]
        if where[0] == "cpu":
            from pykern.jit import raw_host

            raw_host.run(self, shape, values, args, smem, cooperative, check, seed)
            return
        if check or seed:
            raise ArgumentError("check", check, "False on a GPU: run on CPU tensors, or use compute-sanitizer")
        from pykern.jit import raw_cuda

        raw_cuda.run(self, where[1], shape, values, smem, cooperative)

    def _host(self, check: bool) -> Any:
        from pykern.jit import build

        return build.variant(
            str(self.source.path),
            self.qualified,
            backend="host",
            check=check,
            extra_flags=self.source.flags,
            prelude=HOST_PRELUDE,
            epilogue=self.assertion,
        )

    def __repr__(self) -> str:
        return f"RawKernel({self.instance}({', '.join(map(str, self.parameters))}))"


def _chosen(
    declared: dict[str, tuple[Declaration, ...]], written: str, arguments: Sequence[str], instance: str
) -> tuple[str, Declaration]:
    """(name from outside, declaration) of the kernel that a person calls ``written``."""
    last = written.split("::")[-1]
    path = [part for part in written.split("::") if part]
    found = [name for name in declared if name == "::".join(path)]
    found = found or [name for name in declared if name.split("::")[-len(path) :] == path]
    name = found[0] if found else written
    if not found:  # in a namespace that was opened by a macro, or goes by another name
        found = [name for name in declared if name.split("::")[-1] == last and len(path) > 1]
    if not found:
        raise ArgumentError("kernel", repr(instance), ", ".join(declared))
    several = [one for name in found for one in declared[name]]
    if len(several) > 1 and len(found) == 1 and arguments:
        fitting = [one for one in several if _takes(one, len(arguments))]
        several = fitting if len(fitting) == 1 else several
    if len(several) > 1:
        shown = "; ".join(f"{one.name}({', '.join(one.parameters)})" for one in several)
        raise ArgumentError("kernel", repr(instance), f"a name that one kernel has, and there are {shown}: rename one")
    return name, several[0]


def _takes(declared: Declaration, count: int) -> bool:
    required = sum(default is None for _, default in declared.template)
    return required <= count <= len(declared.template)


def _device(device: Any) -> tuple[str, int]:
    kind = getattr(device, "type", None) or str(device).partition(":")[0]
    number = None if isinstance(device, str) else getattr(device, "index", None)
    if number is None and ":" in str(device):
        digits = str(device).partition(":")[2]
        number = int(digits) if digits.isascii() and digits.isdigit() else -1
    if kind not in ("cpu", "cuda") or (number is not None and not 0 <= number < (1 if kind == "cpu" else 256)):
        raise ArgumentError("device", repr(str(device)), "cpu, cuda, cuda:N")
    if kind == "cuda" and number is None:
        import torch

        number = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return kind, number or 0


def _asked(device: Any) -> tuple[str, int]:
    """A device that the caller named, which must be there."""
    kind, number = _device(device)
    if kind == "cpu":
        return kind, number
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if number >= count:
        there = f"cuda:0..cuda:{count - 1}" if count > 1 else "cuda" if count else "cpu (torch sees no CUDA GPU here)"
        raise ArgumentError("device", repr(str(device)), there)
    return kind, number


def _dims(name: str, value: Any, most: tuple[int, int, int]) -> tuple[int, int, int]:
    parts = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not 1 <= len(parts) <= 3 or any(isinstance(part, bool) or not hasattr(part, "__index__") for part in parts):
        raise ArgumentError(name, brief(value), "an int, or one to three of them")
    numbers = [part.__index__() for part in parts]
    for number, limit, axis in zip(numbers, most, "xyz"):
        if not 1 <= number <= limit:
            raise ArgumentError(f"{name}.{axis}", number, f"1 to {limit}")
    x, y, z = [*numbers, 1, 1][:3]
    return x, y, z


def is_tensor(value: Any) -> bool:
    """Whether a value is a torch tensor; asks without importing torch."""
    return hasattr(value, "data_ptr") and hasattr(value, "device")


def _where(parameters: Sequence[Parameter], args: Sequence[Any], device: Any) -> tuple[str, int]:
    """The one device of all tensors. Raises ArgumentError for a mix."""
    first: tuple[str, tuple[str, int]] | None = None
    for parameter, value in zip(parameters, args):
        if not is_tensor(value):
            continue
        if value.device.type not in ("cpu", "cuda"):
            raise ArgumentError(parameter.name, f"a tensor on {value.device}", "a tensor on cpu or cuda")
        here = _device(value.device)
        if first is None:
            first = (parameter.name, here)
        elif here != first[1]:
            there = f"{first[1][0]}:{first[1][1]}" if first[1][0] == "cuda" else "cpu"
            raise ArgumentError(parameter.name, f"a tensor on {value.device}", f"a tensor on {there}, like {first[0]}")
    if first is None:
        return _asked("cpu" if device is None else device)
    if device is not None and _asked(device) != first[1]:
        raise ArgumentError("device", str(device), f"the tensors' device ({first[0]} is on {first[1][0]})")
    return first[1]


def _value(parameter: Parameter, value: Any) -> Any:
    """A ctypes value for one argument, checked."""
    import ctypes

    if not parameter.pointer:
        return signature.scalar(parameter, value)
    if value is None:
        return ctypes.c_void_p(0)
    if not is_tensor(value):
        raise ArgumentError(parameter.name, brief(value), f"a torch tensor or None for `{parameter}`")
    if str(value.layout) != "torch.strided":
        raise ArgumentError(parameter.name, f"layout {value.layout}", "a strided tensor")
    if value.numel() and not value.data_ptr():
        raise ArgumentError(parameter.name, "a tensor without memory (its storage is empty)", "one with its data")
    if value.is_conj() or value.is_neg():
        raise ArgumentError(parameter.name, "a lazily conjugated or negated view", "a tensor with plain memory")
    if value.requires_grad:
        import torch

        if torch.is_grad_enabled():
            raise GradientError(
                f"{parameter.name}: raw kernels have no gradient; pass x.detach() or run under torch.no_grad()"
            )
    signature.check_pointee(parameter, str(value.dtype).removeprefix("torch."), value.data_ptr())
    return ctypes.c_void_p(value.data_ptr())
