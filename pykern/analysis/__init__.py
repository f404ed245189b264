"""Occupancy, coalescing, traffic, roofline and profiles: pure functions of numbers, no torch import."""
