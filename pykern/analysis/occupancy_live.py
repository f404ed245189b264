"""Ask the driver of a GPU: a kernel's own attributes, and how many of its blocks an SM really holds.

Uses ``libcuda`` directly, so nothing but a driver is needed. The module is loaded into the device's primary
context, as the CUDA runtime and PyTorch use it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pykern.analysis.kernel import KernelFacts
from pykern.analysis.occupancy import Config, arch, occupancy
from pykern.errors import KernelError, ToolchainError

_SM_COUNT, _CC_MAJOR, _CC_MINOR = 16, 75, 76  # CU_DEVICE_ATTRIBUTE_*
_MAX_THREADS, _SHARED, _LOCAL, _REGS, _MAX_DYNAMIC, _CARVEOUT = 0, 1, 3, 4, 8, 9  # CU_FUNC_ATTRIBUTE_*
_NON_PORTABLE_CLUSTER = 14
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("dynamic", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("count", ctypes.c_uint),
    )


@dataclass(frozen=True)
class Comparison:
    """Our blocks an SM and the driver's for one block shape."""

    threads: int
    dyn_smem: int
    ours: int
    driver: int

    @property
    def same(self) -> bool:
        """Whether the two agree."""
        return self.ours == self.driver

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"threads": self.threads, "dyn_smem": self.dyn_smem, "ours": self.ours, "driver": self.driver}


class Driver:
    """One device of the CUDA driver. Raises ToolchainError where there is no driver or no such device."""

    def __init__(self, device: int = 0) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ToolchainError(f"no CUDA driver here ({error}): run this on a machine with a GPU") from None
        self._call("cuInit", 0)
        self._device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(self._device), device)
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self._call("cuCtxSetCurrent", self._context)
        self.cc = f"{self._attribute(_CC_MAJOR)}.{self._attribute(_CC_MINOR)}"
        self.sms = self._attribute(_SM_COUNT)
        name = ctypes.create_string_buffer(128)
        self._call("cuDeviceGetName", name, 128, self._device)
        self.name = name.value.decode()

    def _call(self, function: str, *args: object) -> None:
        code = getattr(self._cuda, function)(*args)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(text))
            raise KernelError(f"{function}: {(text.value or b'unknown error').decode()} (CUresult {code})")

    def _attribute(self, attribute: int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, self._device)
        return value.value

    def load(self, image: bytes) -> ctypes.c_void_p:
        """Load a cubin, fat binary or PTX; returns the module."""
        module = ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(image + b"\0"))
        return module

    def function(self, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        """The kernel ``name`` (mangled) of a module."""
        function = ctypes.c_void_p()
        self._call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return function

    def unload(self, module: ctypes.c_void_p) -> None:
        """Unload a module."""
        self._call("cuModuleUnload", module)

    def facts(self, function: ctypes.c_void_p, name: str) -> KernelFacts:
        """What the driver says of a kernel: registers, static shared memory, local memory, largest block."""

        def get(attribute: int) -> int:
            value = ctypes.c_int()
            self._call("cuFuncGetAttribute", ctypes.byref(value), attribute, function)
            return value.value

        return KernelFacts(
            name=name,
            origin=f"driver ({self.name})",
            cc=self.cc,
            regs=get(_REGS),
            static_smem=get(_SHARED),
            max_threads=get(_MAX_THREADS),
            frame=get(_LOCAL),
        )

    def blocks(self, function: ctypes.c_void_p, config: Config) -> int:
        """cuOccupancyMaxActiveBlocksPerMultiprocessor; registers and static shared memory are the kernel's own."""
        self._prepare(function, config)
        count = ctypes.c_int()
        self._call(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
            ctypes.byref(count),
            function,
            config.threads,
            ctypes.c_size_t(config.dyn_smem),
        )
        return count.value

    def clusters(self, function: ctypes.c_void_p, config: Config, size: int) -> int:
        """cuOccupancyMaxActiveClusters for clusters of ``size`` blocks along x."""
        self._prepare(function, config)
        if size > 8:
            self._call("cuFuncSetAttribute", function, _NON_PORTABLE_CLUSTER, 1)
        attribute = _LaunchAttribute(id=_CLUSTER_DIMENSION)
        attribute.value[0:3] = (size, 1, 1)
        launch = _LaunchConfig(
            grid=(size, 1, 1), block=(config.threads, 1, 1), dynamic=config.dyn_smem, stream=None,
            attributes=ctypes.pointer(attribute), count=1,
        )  # fmt: skip
        count = ctypes.c_int()
        self._call("cuOccupancyMaxActiveClusters", ctypes.byref(count), function, ctypes.byref(launch))
        return count.value

    def _prepare(self, function: ctypes.c_void_p, config: Config) -> None:
        # The opt-in is set when it is needed and allowed; where it is refused the driver then answers 0 blocks.
        limit = arch(self.cc).smem_per_block - config.static_smem
        if arch(self.cc).smem_per_block_default - config.static_smem < config.dyn_smem <= limit:
            self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC, config.dyn_smem)
        self._call("cuFuncSetAttribute", function, _CARVEOUT, config.carveout_pct)


def compare(
    driver: Driver, function: ctypes.c_void_p, base: Config, shapes: Sequence[tuple[int, int]]
) -> list[Comparison]:
    """Our answer beside the driver's for each (threads, dynamic bytes) of ``shapes``."""
    rows = []
    for threads, dynamic in shapes:
        config = base.but(threads=threads, dyn_smem=dynamic)
        rows.append(
            Comparison(threads, dynamic, occupancy(driver.cc, config).blocks, driver.blocks(function, config))
        )
    return rows
