"""Every error pykern raises on purpose. Messages name the argument, its value and what is allowed."""

from __future__ import annotations


class PykernError(Exception):
    """Base class of all errors raised by pykern."""


MOST_SHOWN = 300  # characters of a value in a message


class ArgumentError(PykernError, ValueError):
    """A bad argument: the message is ``name: got <value>, allowed: <what>``."""

    def __init__(self, name: str, value: object = None, allowed: str | None = None) -> None:
        self.name, self.value, self.allowed = name, value, allowed
        try:
            shown = str(value)
        except ValueError:  # an int of more digits than Python prints
            shown = brief(value)
        shown = shown if len(shown) <= MOST_SHOWN else f"{shown[: MOST_SHOWN - 3]}..."
        super().__init__(name if allowed is None else f"{name}: got {shown}, allowed: {allowed}")


def brief(value: object) -> str:
    """``repr`` in one line of at most 100 characters; an array by its type, dtype and shape."""
    kind, shape, dtype = type(value), getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape and dtype is not None:
        return f"a {kind.__module__.partition('.')[0]} {kind.__name__} of {dtype} {tuple(shape)}"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # of a stranger's class
        text = f"an int of {value.bit_length()} bits" if isinstance(value, int) else f"a {kind.__name__}"
    return text if len(text) <= 100 else f"{text[:97]}..."


def typed(value: object) -> str:
    """What a refused argument was: its type and value, of an array what :func:`brief` says."""
    array = hasattr(value, "dtype") and bool(getattr(value, "shape", None))
    return brief(value) if array else f"{type(value).__name__} {brief(value)}"


class GradientError(PykernError, RuntimeError):
    """A gradient was asked of an inference-only op."""


class ToolchainError(PykernError, RuntimeError):
    """A compiler or toolkit is missing, of the wrong version, or misconfigured."""


class BuildError(PykernError, RuntimeError):
    """A compile failed. The message starts with the first compiler error and a hint where the cause is known."""

    def __init__(self, message: str, *, log: str = "", command: str = "") -> None:
        self.log, self.command = log, command
        super().__init__(message)


class CaptureError(PykernError, RuntimeError):
    """A compile would have been needed during CUDA graph capture: call ``pykern warmup`` first."""


class CheckError(PykernError, RuntimeError):
    """The host checker found a defect in a kernel (race, bounds, uninitialised read, deadlock ...).

    ``reports`` holds one ``dict`` per finding (kind, kernel, file, line, thread, address, tensor, message).
    """

    def __init__(self, message: str, reports: list[dict] | None = None) -> None:
        self.reports = reports or []
        super().__init__(message)


class KernelError(PykernError, RuntimeError):
    """A kernel failed to launch or failed while it ran."""


class ModelError(PykernError, ValueError):
    """A model file is truncated, corrupt, mislabelled or of an unsupported kind."""


def require(ok: bool, name: str, value: object, allowed: str) -> None:
    """Raise :class:`ArgumentError` for argument ``name`` unless ``ok``."""
    if not ok:
        raise ArgumentError(name, value, allowed)
