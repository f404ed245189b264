"""What a call costs the CPU: ``python scripts/latency.py [--quick]``, on a GPU.

Prints, in microseconds, an eager ``pykern.softmax`` and ``out=`` of it beside torch's (64 x 1024 bfloat16; batches of
calls that do not fill the launch queue, the median and the fastest batch); then, in seconds and each in a new process:
``import pykern`` and the first softmax over ``import torch``, with a warm cache and with an empty one (``--quick``
leaves these out).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

CALLS, BATCHES = 200, 50

# Run in a new process: torch is imported and has its CUDA context before the clock starts.
FIRST = """
import json, time
import torch
x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
t = [time.perf_counter()]
import pykern
t.append(time.perf_counter())
y = pykern.softmax(x)
torch.cuda.synchronize()
t.append(time.perf_counter())
assert (y.float() - torch.softmax(x.float(), -1)).abs().max() < 1e-2
print(json.dumps({"import": t[1] - t[0], "first": t[2] - t[1]}))
"""


def of_call(call: Callable[[], Any]) -> tuple[float, float]:
    """CPU time of a call in microseconds: median and fastest batch."""
    import torch

    times = []
    for _ in range(BATCHES):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(times), min(times)


def first_call(cache: str) -> dict[str, float]:
    """Seconds that importing pykern and its first call take in a new process."""
    env = os.environ | {"PYKERN_CACHE": cache}
    out = subprocess.run([sys.executable, "-c", FIRST], env=env, check=True, capture_output=True, text=True).stdout
    return json.loads(out.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="calls only, no new processes")
    quick = parser.parse_args().quick
    import torch

    if not torch.cuda.is_available():
        print("latency.py: torch sees no CUDA GPU", file=sys.stderr)
        return 2
    import pykern

    x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)
    arms: dict[str, Callable[[], Any]] = {
        "pykern.softmax(x)": lambda: pykern.softmax(x),
        "torch.softmax(x, -1)": lambda: torch.softmax(x, -1),
        "pykern.softmax(x, out=out)": lambda: pykern.softmax(x, out=out),
        "torch.softmax(x, -1, out=out)": lambda: torch.softmax(x, -1, out=out),
    }
    for call in arms.values():
        for _ in range(CALLS):
            call()
    for name, call in arms.items():
        median, low = of_call(call)
        print(f"{name:<32} {median:6.2f} us a call, fastest batch {low:6.2f}")
    if quick:
        return 0
    with tempfile.TemporaryDirectory() as cache:
        cold = first_call(cache)
        warm = [first_call(cache) for _ in range(3)]
    print(f"{'import pykern':<32} {statistics.median(w['import'] for w in warm):6.3f} s over import torch")
    print(f"{'first softmax, warm cache':<32} {statistics.median(w['first'] for w in warm):6.3f} s")
    print(f"{'first softmax, empty cache':<32} {cold['first']:6.3f} s: launcher and kernel built")
    return 0


if __name__ == "__main__":
    sys.exit(main())
