"""Functions that make the ranks' weights equal, copy them to flat tensors, and exchange them around optimizer steps."""
