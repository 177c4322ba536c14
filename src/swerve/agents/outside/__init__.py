"""Outside agents: programs that speak the OpenAI protocol play episodes, and every token is recorded as for our own.

This package owns the server such a program talks to, the check that its conversation only grows, the `docker` it finds
on its path, and its process tree. It knows a `PolicySession` and a `Sandbox`, and nothing of grading.
"""

from swerve.agents.outside.play import AgentProgramError, OutsideAgents

__all__ = ["AgentProgramError", "OutsideAgents"]
