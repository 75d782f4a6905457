"""Activations of which each rank has a part, while the model's code computes as if each were whole."""

from . import elementwise, products, views  # importing them registers what they know
from .tensor import DividedTensor, Place, Ranks, whole_of

__all__ = ["DividedTensor", "Place", "Ranks", "elementwise", "products", "views", "whole_of"]
