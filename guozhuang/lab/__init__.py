"""Measuring: the same workload under several strategies, side by side, and what to conclude from it."""
