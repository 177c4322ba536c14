"""Where the roles of a run live: this package owns launchers, which turn a recipe into processes on machines.

A launcher decides placement, environment and restarts; what a role computes is decided elsewhere.
"""
