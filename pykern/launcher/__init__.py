"""The stable-ABI extension that every op is called through, and the packing of its records."""
