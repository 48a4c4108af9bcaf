"""Floor 1: decisions as pure functions: plain data in, plain data out."""
