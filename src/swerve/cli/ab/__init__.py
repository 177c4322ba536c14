"""`swerve ab`: two ways to train, held against each other by their gradients and updates.

`arms` runs them, `verdicts` compares what they did, `breaks` spoils one of them to show that it would be noticed.
"""
