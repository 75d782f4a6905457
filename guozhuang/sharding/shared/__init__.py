"""Sharding for ranks of one node: shared memory holds one copy of the weights, and each rank's gradients for all ranks."""
