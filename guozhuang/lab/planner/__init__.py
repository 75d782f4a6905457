"""``guozhuang plan``: which layouts fit, and which is fastest."""
