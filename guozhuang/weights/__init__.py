"""Weights of several ranks: made equal at the start, copied to flat tensors, exchanged around optimizer steps."""
