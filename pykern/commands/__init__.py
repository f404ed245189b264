"""One module a command, named as the command is. Names that begin with ``_`` are helpers."""

# What ``pykern --help`` says of each, so that it imports none of them; a test holds it against the commands' own words.
SHORT_HELP = {
    "bench": "Time the ops on this GPU beside their peers.",
    "cache": "Show or clear the build cache.",
    "check": "Run a kernel under the checker: races, bounds, traffic per line.",
    "coalescing": "Sectors, bank conflicts and the fix of an access pattern.",
    "compile": "Build every op variant with nvcc (no GPU needed).",
    "doctor": "Explain this machine: Python, torch, compilers, GPU, cache.",
    "explain": "Which kernel variant a problem gets, and why.",
    "generate": "Generate text with a GGUF or safetensors model.",
    "occupancy": "What limits a kernel's occupancy, and what to change.",
    "report": "Every analysis on one interactive page that needs no network.",
    "roofline": "What bounds ops, measurements and whole models on a chip.",
    "traffic": "What fusing a chain of operations saves, and from which batch on.",
    "warmup": "Compile op kernels ahead of their first call.",
}
