"""Floor 0: errors, events, addresses, clock and the virtual-time loop. Imports nothing above it."""
