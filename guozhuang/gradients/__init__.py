"""Turns autograd's hooks into exchanges of full buckets (``reducer``), and matches collectives by name (``named``)."""
