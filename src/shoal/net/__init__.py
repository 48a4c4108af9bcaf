"""Floor 2: authenticated peers, calls and streams over TCP or, in the simulated world, over memory."""
