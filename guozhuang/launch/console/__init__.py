"""What the launcher and the ranks print, shown on one terminal."""
