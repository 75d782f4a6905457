"""Weights of several ranks: equal at the start, copied flat, and exchanged around the steps of an optimizer."""
