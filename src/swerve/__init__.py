"""Swerve trains language models into agents that repair software, by reinforcement learning with verifiable rewards."""

__version__ = "0.1.0"
