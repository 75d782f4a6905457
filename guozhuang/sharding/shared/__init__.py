"""Sharding for ranks of one node: one copy of the weights in shared memory; each rank reads the others' gradients there."""
