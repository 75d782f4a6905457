"""Measures a workload under several strategies side by side, and concludes which strategy to use."""
