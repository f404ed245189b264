"""pykern: CUDA kernels for LLM inference whose one source also runs, checked, on the CPU."""

__version__ = "0.1.0"
