"""Floor 5: the simulated world."""
