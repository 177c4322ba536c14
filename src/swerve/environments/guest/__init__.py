"""Owns what harnesses import inside sandboxes; its modules stand alone."""

from pathlib import Path

GUEST_DIR = Path(__file__).parent
"""On the import path of images whose harnesses run pytest."""
