"""Our model against other implementations of it."""
