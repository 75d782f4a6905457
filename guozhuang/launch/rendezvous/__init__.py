"""How the agents of several nodes meet, and what they tell each other."""
