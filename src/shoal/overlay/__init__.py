"""Floor 2: who is in the run, and what the run is. Needs no torch, so a seed can serve it."""
