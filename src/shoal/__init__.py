"""shoal: one PyTorch model, many unequal machines, no coordinator."""
