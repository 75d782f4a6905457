"""The model itself divided among ranks: groups of a layout (``axes``), parts of parameters (``division``), ``prepare``."""
