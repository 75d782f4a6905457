"""Several hosts over ssh (``-H``): who gets which ranks, how each is reached, and how all end together."""
