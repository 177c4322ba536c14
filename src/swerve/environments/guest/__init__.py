"""Owns what harnesses import inside sandboxes; its modules stand alone."""
