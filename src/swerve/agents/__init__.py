"""Agents: what happens between a policy and a sandbox during one episode.

This package owns the turn loop, the tools with their schemas, and the editor. It asks a `PolicySession` for tokens and
a `Sandbox` for effects; it knows nothing of tasks, of grading, or of where either of the two comes from.
"""

from swerve.agents.codeact import NO_CALL, CodeActAgent
from swerve.agents.editor import StrReplaceEditor
from swerve.agents.styles import NUMBERED, PLAIN, STYLES, TOOL_SCHEMAS, PlainStyle
from swerve.agents.tools import Toolbox
from swerve.agents.transcript import Transcript

__all__ = [
    "NO_CALL",
    "NUMBERED",
    "PLAIN",
    "STYLES",
    "TOOL_SCHEMAS",
    "CodeActAgent",
    "PlainStyle",
    "StrReplaceEditor",
    "Toolbox",
    "Transcript",
]
