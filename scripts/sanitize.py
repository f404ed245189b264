"""Run the GPU tests under compute-sanitizer: ``python scripts/sanitize.py memcheck racecheck initcheck synccheck``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def find_sanitizer() -> str | None:
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    beside = [str(Path(home) / "bin" / "compute-sanitizer") for home in homes if home]
    return next((p for p in [shutil.which("compute-sanitizer"), *beside] if p and Path(p).exists()), None)


def main(tools: list[str]) -> int:
    unknown = [tool for tool in tools if tool not in TOOLS]
    if unknown:
        print(f"unknown tool {unknown[0]!r}: {', '.join(TOOLS)}", file=sys.stderr)
        return 2
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print("compute-sanitizer is not on PATH, nor under CUDA_HOME or /usr/local/cuda", file=sys.stderr)
        return 2
    # One test process, so that no kernel escapes; compiles are done first, since the tool slows the compilers too.
    tests = [sys.executable, "-m", "pytest", "-m", "gpu and not slow", "-n", "0", "-x"]
    # torch's allocator hands out parts of one block, which hides overruns from memcheck and initcheck.
    env = dict(os.environ, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    failed = []
    for tool in tools or TOOLS:
        print(f"== compute-sanitizer --tool {tool}", flush=True)
        watch = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--launch-timeout", "0"]
        if subprocess.run(watch + tests, env=env).returncode:
            failed.append(tool)
    print("compute-sanitizer: " + (f"failed: {', '.join(failed)}" if failed else "no errors"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
