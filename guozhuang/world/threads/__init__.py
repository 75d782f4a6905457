"""Threads and cores of a rank that computes on the CPU: ``choice`` decides (pure), ``settle`` looks and acts."""
