"""The command line: this package reads a recipe, builds the roles of a run, and injects them into each other.

It is the composition root, the only place that knows every layer. Each command is one module of `commands`; nothing
is imported before it is needed.
"""
