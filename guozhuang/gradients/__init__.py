"""Autograd hooks to full buckets to exchanges (``reducer``), and collectives that are matched by name (``named``)."""
