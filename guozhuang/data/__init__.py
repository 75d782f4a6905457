"""Samplers and loaders that give each rank its share of the data, and resume in mid-epoch on any number of ranks."""

from guozhuang.data.loader import Loader, loader
from guozhuang.data.sampler import DistributedSampler
from guozhuang.data.stream import StridedStream

__all__ = ["DistributedSampler", "Loader", "StridedStream", "loader"]
