"""Pipelines: a model cut into stages on several ranks, through which the microbatches of a batch go one behind the other."""

from .gpipe import divide_pipeline as divide_pipeline
