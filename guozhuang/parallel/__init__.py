"""The model itself divided over ranks: pipelines, tensors, space and sequences, and their mixes."""
