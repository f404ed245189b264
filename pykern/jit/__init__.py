"""From a kernel's source to the address of its entry: toolchain, cache, build, variants.

Importing this package imports neither torch nor a compiler; both wait for the first build.
"""
