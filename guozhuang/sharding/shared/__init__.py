"""Ranks of one node: the weights exist once in shared memory, and gradients are read where they lie."""
