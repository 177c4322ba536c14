"""Where the roles of a run live: this package owns launchers, which turn one recipe into processes on a machine or cluster.

A launcher decides placement, environment and restarts; what a role computes is decided elsewhere.
"""
