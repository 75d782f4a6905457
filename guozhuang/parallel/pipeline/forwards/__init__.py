"""The model's own forward, run by a stage that computes some of its units and passes over the rest."""
