"""The compilers of this machine, found when a build first needs them and checked before they are used.

A wrong toolchain is named here, with its path and what would be right, instead of failing inside a build:
``CUDA_HOME`` that is no toolkit, an nvcc of another CUDA major than torch's, a host compiler that nvcc
refuses.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from pykern.errors import ToolchainError

# The extra `pykern[cuda]`: one CUDA minor, pinned together (an unpinned nvvm or crt is newer than nvcc and
# every compile ends in "Unsupported .version").
CUDA_WHEELS = {
    "nvidia-cuda-nvcc": "13.0.*",
    "nvidia-nvvm": "13.0.*",
    "nvidia-cuda-crt": "13.0.*",
    "nvidia-cuda-cccl": "13.0.*",
    "nvidia-cuda-runtime": "13.0.*",
}
USUAL = Path("/usr/local/cuda")  # where NVIDIA's installer puts a toolkit
_ADVICE = (
    "install a CUDA toolkit, set CUDA_HOME to one, or `pip install '.[cuda]'` in a checkout of pykern (NVIDIA's wheels)"
)


@dataclass(frozen=True)
class Cxx:
    """A C++ compiler: ``version`` is what goes into keys, e.g. ``g++ 12.2.0``."""

    path: Path
    kind: str  # "gcc" or "clang"
    version: str

    @property
    def major(self) -> int:
        return int(self.version.split()[1].split(".")[0])


@dataclass(frozen=True)
class CudaToolchain:
    """A CUDA compiler: ``home`` holds ``bin/nvcc`` and ``include``.

    ``libcudart`` may be None (compile only).
    """

    home: Path
    nvcc: Path
    version: str  # "13.0.88"
    origin: str  # how it was found: "CUDA_HOME", "PATH", "wheel"
    libcudart: Path | None
    gcc_max: int | None
    clang_max: int | None

    @property
    def major(self) -> int:
        return int(self.version.split(".")[0])


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError) as error:
        return f"\0{error}"
    return done.stdout + done.stderr


def _stamp(path: str | os.PathLike[str]) -> tuple[str, int, int]:
    info = os.stat(path)
    return (str(path), info.st_mtime_ns, info.st_size)


@functools.lru_cache(maxsize=32)
def _identify_cxx(stamp: tuple[str, int, int]) -> Cxx:
    path = stamp[0]
    out = _run(path, "--version")
    first = out.splitlines()[0] if out.strip() else ""
    if "clang" in first.lower():
        found = re.search(r"version (\d+\.\d+\.\d+)", first)
        kind, name = "clang", "clang"
    else:
        found = re.search(r"(\d+\.\d+\.\d+)(?!.*\d+\.\d+\.\d+)", first)
        kind, name = "gcc", "g++"
    if out.startswith("\0") or found is None:
        raise ToolchainError(f"{path} is no C++ compiler: `{path} --version` said {out.strip(chr(0))[:200]!r}")
    return Cxx(Path(path), kind, f"{name} {found[1]}")


def identify_cxx(path: str | os.PathLike[str]) -> Cxx:
    """Kind and version of a compiler, remembered by (path, mtime, size)."""
    return _identify_cxx(_stamp(path))


def find_cxx() -> Path:
    """The C++ compiler: ``CXX`` from the environment, else g++, c++, clang++ on ``PATH``.

    Raises ToolchainError.
    """
    override = os.environ.get("CXX", "").strip()
    if override:
        path = shutil.which(override)
        if path is None:
            raise ToolchainError(f"CXX: got {override!r}, allowed: the path or name of a C++ compiler (not found)")
        return Path(path)
    for name in ("g++", "c++", "clang++"):
        path = shutil.which(name)
        if path is not None:
            return Path(path)
    raise ToolchainError("no C++ compiler: none of g++, c++, clang++ is on PATH; install g++ (>= 11) or set CXX")


def cxx() -> Cxx:
    """:func:`find_cxx`, identified."""
    return identify_cxx(find_cxx())


def find_ninja() -> Path:
    """The ninja binary.

    Of this Python's ``ninja`` package (also when its venv is not activated), else on PATH.
    """
    places: list[str] = []
    with contextlib.suppress(Exception):  # a broken package is as good as none: the next places are tried
        places.append(str(importlib.import_module("ninja").BIN_DIR))
    places.append(os.path.dirname(sys.executable))
    for place in places:
        path = os.path.join(place, "ninja")
        if os.access(path, os.X_OK):
            return Path(path)
    on_path = shutil.which("ninja")
    if on_path is None:
        raise ToolchainError(f"ninja is missing: `{sys.executable} -m pip install ninja`")
    return Path(on_path)


def _wheel_homes() -> list[Path]:
    """Toolkits that NVIDIA's wheels laid out: ``site-packages/nvidia/cu13`` and the like, newest first."""
    homes: list[Path] = []
    for entry in sys.path:
        folder = Path(entry or ".") / "nvidia"
        try:
            homes += [home for home in folder.glob("cu[0-9]*") if (home / "bin" / "nvcc").is_file()]
        except OSError:
            continue
    return sorted(homes, key=lambda home: int(re.sub(r"\D", "", home.name) or 0), reverse=True)


def _home_from_env(name: str, value: str) -> Path:
    """``CUDA_HOME`` and ``CUDA_PATH`` as they are commonly mis-set, each refused by name."""
    allowed = "the folder of one CUDA toolkit, the one that holds bin/nvcc"
    if ":" in value:
        raise ToolchainError(f"{name}: got {value!r}, allowed: {allowed} (a single path, no ':')")
    home = Path(value).expanduser()
    if not home.is_dir():
        raise ToolchainError(f"{name}: got {value!r}, allowed: {allowed} (no such folder)")
    if not (home / "bin" / "nvcc").is_file():
        hint = f"; did you mean {home.parent}?" if (home / "nvcc").is_file() else ""
        raise ToolchainError(f"{name}: got {value!r}, allowed: {allowed} (no bin/nvcc in it{hint})")
    return home


@functools.lru_cache(maxsize=8)
def _home_of_nvcc(stamp: tuple[str, int, int]) -> Path:
    """The toolkit an nvcc on PATH belongs to. It may be a wrapper elsewhere, so nvcc itself is asked."""
    nvcc = Path(stamp[0])
    direct = nvcc.resolve().parent.parent
    if (direct / "bin" / "nvcc.profile").is_file() or (direct / "nvvm").is_dir():
        return direct
    found = re.search(r"^#\$ TOP=(.*)$", _run(str(nvcc), "--dryrun", "-c", "x.cu"), re.MULTILINE)
    if found is None:
        raise ToolchainError(f"{nvcc} is no working nvcc: `nvcc --dryrun` names no toolkit; {_ADVICE}")
    return Path(found[1].strip().strip('"')).resolve()


def _locate_cuda() -> tuple[Path, str]:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        value = os.environ.get(name, "").strip()
        if value:
            return _home_from_env(name, value), name
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        return _home_of_nvcc(_stamp(nvcc)), "PATH"
    wheels = _wheel_homes()
    if wheels:
        return wheels[0], "wheel"
    if (USUAL / "bin" / "nvcc").is_file():
        return USUAL, str(USUAL)
    raise ToolchainError(f"no CUDA compiler: CUDA_HOME is not set, nvcc is not on PATH and not in a wheel; {_ADVICE}")


def _libcudart(home: Path, major: int) -> Path | None:
    for folder in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
        for name in (f"libcudart.so.{major}", "libcudart.so"):
            if (home / folder / name).exists():
                return home / folder / name
    for entry in sys.path:  # the runtime wheel beside torch, when nvcc comes from elsewhere
        path = Path(entry or ".") / "nvidia" / f"cu{major}" / "lib" / f"libcudart.so.{major}"
        if path.exists():
            return path
    return None


def _host_limits(home: Path) -> tuple[int | None, int | None]:
    """Newest gcc and clang majors that this toolkit's own header accepts."""
    try:
        text = (home / "include" / "crt" / "host_config.h").read_text(errors="replace")
    except OSError:
        return None, None
    gcc = re.findall(r"__GNUC__ > (\d+)", text)
    clang = re.findall(r"__clang_major__ (>=?) (\d+)", text)
    newest_clang = [int(number) - (1 if sign == ">=" else 0) for sign, number in clang]
    return (max(map(int, gcc)) if gcc else None), (min(newest_clang) if newest_clang else None)


@functools.lru_cache(maxsize=8)
def _identify_cuda(home: Path, origin: str, stamp: tuple[str, int, int]) -> CudaToolchain:
    out = _run(stamp[0], "--version")
    found = re.search(r"\bV(\d+\.\d+\.\d+)", out)
    if found is None:
        raise ToolchainError(f"{stamp[0]} is no working nvcc: `nvcc --version` said {out.strip(chr(0))[:200]!r}")
    major = int(found[1].split(".")[0])
    return CudaToolchain(home, Path(stamp[0]), found[1], origin, _libcudart(home, major), *_host_limits(home))


def find_cuda() -> CudaToolchain:
    """The CUDA toolkit: ``CUDA_HOME``/``CUDA_PATH``, nvcc on PATH, NVIDIA's pip wheels, /usr/local/cuda.

    Raises ToolchainError that names the variable and its value where one is set wrongly: a bad setting is
    never passed over in silence. Nothing is imported; nvcc is asked for its version once per process and
    binary.
    """
    home, origin = _locate_cuda()
    nvcc = home / "bin" / "nvcc"
    if not nvcc.is_file():
        raise ToolchainError(f"{home} (from {origin}) holds no bin/nvcc; {_ADVICE}")
    return _identify_cuda(home, origin, _stamp(nvcc))


def has_cuda() -> bool:
    """Whether :func:`find_cuda` finds a toolkit."""
    try:
        find_cuda()
    except ToolchainError:
        return False
    return True


def check_torch_cuda(cuda: CudaToolchain, torch_cuda: str | None) -> None:
    """Refuse an nvcc whose CUDA major is not torch's: kernels and torch must share one CUDA runtime."""
    if torch_cuda and int(torch_cuda.split(".")[0]) != cuda.major:
        major = torch_cuda.split(".")[0]
        raise ToolchainError(
            f"nvcc {cuda.version} ({cuda.nvcc}, from {cuda.origin}) and torch (CUDA {torch_cuda}) differ in CUDA's "
            f"major version; set CUDA_HOME to a CUDA {major} toolkit, or install a torch built for CUDA {cuda.major}"
        )


def _limit(cuda: CudaToolchain, compiler: Cxx) -> int | None:
    return cuda.gcc_max if compiler.kind == "gcc" else cuda.clang_max


def host_compiler(cuda: CudaToolchain) -> Cxx:
    """The C++ compiler that nvcc gets by ``-ccbin``.

    The machine's own, else the newest g++-N that nvcc accepts.
    """
    mine = cxx()
    limit = _limit(cuda, mine)
    if limit is None or mine.major <= limit:
        return mine
    for number in range(cuda.gcc_max or 0, 8, -1):
        path = shutil.which(f"g++-{number}")
        if path is not None:
            return identify_cxx(path)
    raise ToolchainError(
        f"nvcc {cuda.version} does not accept {mine.version} ({mine.path}): it takes {mine.kind} up to {limit}; "
        f"install g++-{cuda.gcc_max} (it is then passed as -ccbin) or set CXX to an older compiler"
    )
