"""How conversations become tokens and tokens become tool calls: tokenizer, templates, renderer, tool-call grammar.

This package owns every byte between the contents of a conversation. It knows neither tools' behaviour nor sandboxes
nor policies. Generated tokens pass through it once, to be read, and are never tokenised again.
"""

from swerve.rendering.conversation import (
    ConversationRenderer,
    DemonstrationTurn,
    Message,
    Template,
    demonstration_text,
)
from swerve.rendering.tokenizer import SPECIAL_TOKENS, TURN_END, Tokenizer
from swerve.rendering.tool_calls import (
    MalformedCall,
    ParameterSchema,
    ParsedTurn,
    ToolCall,
    ToolSchema,
    parse_tool_calls,
    render_call,
    render_calls,
)

__all__ = [
    "SPECIAL_TOKENS",
    "TURN_END",
    "ConversationRenderer",
    "DemonstrationTurn",
    "MalformedCall",
    "Message",
    "ParameterSchema",
    "ParsedTurn",
    "Template",
    "Tokenizer",
    "ToolCall",
    "ToolSchema",
    "demonstration_text",
    "parse_tool_calls",
    "render_call",
    "render_calls",
]
