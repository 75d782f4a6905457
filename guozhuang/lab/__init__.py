"""Measure a workload under several strategies side by side, and recommend one of the strategies."""
