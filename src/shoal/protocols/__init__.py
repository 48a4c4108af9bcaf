"""Floor 3: conversations between peers, each readable from top to bottom like the paper it follows."""
