"""Show the output of the launcher and of all ranks on one terminal."""
