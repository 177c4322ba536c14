"""Single-site mutations of one short function, and the edits that could undo one.

A mutation is an `Edit`: a span of characters of the source and the text that replaces it. Every edit lies within one
line and leaves a source that parses. `sites` lists the ways to break a right function; `candidates` lists the
plausible repairs of a broken one, which is what blind enumeration tries.

Sources are ASCII (columns of the syntax tree are then character columns), dedented, and hold exactly one function.
"""

from __future__ import annotations

import ast
import io
import re
import textwrap
import tokenize
import warnings
from collections.abc import Iterator
from typing import NamedTuple


class Edit(NamedTuple):
    """One replacement within one line.

    Attributes:
        kind: Operator family: `compare`, `arithmetic`, `augmented`, `boolean`, `constant`, `not`, `negation`,
            `return`, `swap`, `call` or `jump`.
        start: Offset of the first replaced character.
        end: Offset after the last replaced character; equals `start` for an insertion.
        text: What replaces `source[start:end]`.
    """

    kind: str
    start: int
    end: int
    text: str


KINDS = (
    "arithmetic",
    "augmented",
    "boolean",
    "call",
    "compare",
    "constant",
    "jump",
    "negation",
    "not",
    "return",
    "swap",
)

MAX_SWAP_CHARACTERS = 28
MAX_CONSTANT = 99

_COMPARE: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">")),
    ast.LtE: ("<=", ("<", ">=")),
    ast.Gt: (">", (">=", "<")),
    ast.GtE: (">=", (">", "<=")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, tuple[str, ...]]] = {
    ast.Add: ("+", ("-",)),
    ast.Sub: ("-", ("+",)),
    ast.Mult: ("*", ("//",)),
    ast.FloorDiv: ("//", ("*",)),
    ast.Div: ("/", ("*",)),
    ast.Mod: ("%", ("//",)),
    ast.BitAnd: ("&", ("|",)),
    ast.BitOr: ("|", ("&",)),
    ast.LShift: ("<<", (">>",)),
    ast.RShift: (">>", ("<<",)),
}
_LOST: dict[type[ast.operator], tuple[str, tuple[str, ...]]] = {
    ast.FloorDiv: ("//", ("%",)),
    ast.Mult: ("*", ("/",)),
}
"""What a mutation of arithmetic may have replaced, beyond what `_ARITHMETIC` undoes."""

_SIBLINGS = (
    ("min", "max"),
    ("any", "all"),
    ("append", "extend"),
    ("lower", "upper"),
    ("lstrip", "rstrip"),
    ("startswith", "endswith"),
    ("keys", "values"),
    ("split", "rsplit"),
    ("find", "rfind"),
    ("index", "rindex"),
    ("partition", "rpartition"),
    ("ljust", "rjust"),
    ("floor", "ceil"),
    ("isdigit", "isalpha"),
    ("islower", "isupper"),
    ("takewhile", "dropwhile"),
    ("bisect_left", "bisect_right"),
    ("pop", "get"),
    ("add", "discard"),
    ("union", "intersection"),
    ("popleft", "pop"),
)
_SIBLING_NAMES: dict[str, tuple[str, ...]] = {
    name: tuple(sorted({pair[1 - pair.index(name)] for pair in _SIBLINGS if name in pair}))
    for pair_ in _SIBLINGS
    for name in pair_
}
_ORDER_FREE_CALLS = frozenset({"isinstance", "issubclass", "getattr", "hasattr", "setattr", "delattr"})


def parse(source: str) -> ast.Module:
    """Parse a source, silently: warnings about other people's string literals help nobody."""
    if "\\" not in source:
        return ast.parse(source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


def apply(source: str, edit: Edit) -> str:
    """Carry out an edit."""
    return source[: edit.start] + edit.text + source[edit.end :]


def line_of(source: str, edit: Edit) -> int:
    """1-based line that an edit touches."""
    return source.count("\n", 0, edit.start) + 1


def sites(source: str) -> list[Edit]:
    """List every single-site mutation of a function.

    Args:
        source: Source text of one function: ASCII, dedented.

    Returns:
        Edits in order of position, one per distinct outcome; each outcome parses and differs in one line.

    Raises:
        SyntaxError: The source does not parse.
        ValueError: The source is not ASCII or holds no function.
    """
    function = _function(source)
    finder = _Finder(source)
    return finder.distinct(finder.mutations(function))


def candidates(source: str) -> list[Edit]:
    """List plausible repairs of a function that one mutation broke.

    These are the mutations again, since most are their own inverse, and the inverses of those that are not:
    something other than `None` returned, a `-` or a `not` put back.

    Args:
        source: Source text of one function: ASCII, dedented.

    Returns:
        Edits in order of position, one per distinct outcome; each outcome parses and differs in one line.

    Raises:
        SyntaxError: The source does not parse.
        ValueError: The source is not ASCII or holds no function.
    """
    function = _function(source)
    finder = _Finder(source)
    return finder.distinct([*finder.mutations(function), *finder.inverses(function)])


def normalise_function(source_segment: str) -> str | None:
    """Reduce a function to what matters, keeping its formatting: the form in which tasks show functions.

    The function is dedented; its docstring, comments, decorators and blank lines are dropped.

    Args:
        source_segment: Lines of one function as they stand in a file, decorators allowed.

    Returns:
        Its text with a newline at the end, or `None` where that cannot be done without changing its meaning (strings
        over several lines that look like comments or blanks, not ASCII, no function, nothing left).
    """
    text = textwrap.dedent(source_segment)
    try:
        function = _function(text)
    except (SyntaxError, ValueError):
        return None
    lines = text.split("\n")
    dropped = set(range(1, function.lineno))
    body = function.body
    if _is_docstring(body[0]):
        if len(body) == 1 or body[1].lineno == body[0].end_lineno or body[0].lineno == function.lineno:
            return None
        dropped |= set(range(body[0].lineno, (body[0].end_lineno or 0) + 1))
        body = body[1:]
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, IndentationError):
        return None
    for token in tokens:
        row, column = token.start
        if token.type == tokenize.COMMENT:
            lines[row - 1] = lines[row - 1][:column]
        elif token.type == tokenize.STRING and token.end[0] != row and row not in dropped:
            return None
    kept = [line.rstrip() for number, line in enumerate(lines, 1) if number not in dropped and line.strip()]
    result = "\n".join(kept) + "\n"
    try:
        reduced = _function(result)
    except (SyntaxError, ValueError):
        return None
    same = ast.dump(reduced.args) == ast.dump(function.args) and [ast.dump(node) for node in reduced.body] == [
        ast.dump(node) for node in body
    ]
    return result if same else None


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _function(source: str) -> ast.FunctionDef:
    if not source.isascii():
        raise ValueError("the source is not ASCII")
    tree = parse(source)
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        raise ValueError("the source does not hold exactly one function")
    return tree.body[0]


class _Finder:
    """Walks one function; spans are offsets into its source."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.offsets = [0]
        for line in source.split("\n"):
            self.offsets.append(self.offsets[-1] + len(line) + 1)

    def distinct(self, edits: list[Edit]) -> list[Edit]:
        """Order edits; keep those within a line that parse, the first of each outcome."""
        outcomes = {self.source}
        result = []
        for edit in sorted(edits, key=lambda edit: (edit.start, edit.end, edit.text, edit.kind)):
            outcome = apply(self.source, edit)
            if outcome in outcomes or "\n" in self.source[edit.start : edit.end]:
                continue
            outcomes.add(outcome)
            try:
                parse(outcome)
            except SyntaxError:
                continue
            result.append(edit)
        return result

    def mutations(self, function: ast.FunctionDef) -> list[Edit]:
        edits: list[Edit] = []
        for node in self._nodes(function):
            edits.extend(self._operator_edits(node))
            edits.extend(self._value_edits(node))
            edits.extend(self._condition_edits(node))
            edits.extend(self._statement_edits(node))
            edits.extend(self._call_edits(node))
        return edits

    def inverses(self, function: ast.FunctionDef) -> list[Edit]:
        edits: list[Edit] = []
        names = self._names(function)
        for node in self._nodes(function):
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Constant) and node.value.value is None:
                start, end = self._span(node.value)
                edits.extend(Edit("return", start, end, name) for name in [*names, "True", "False", "self"])
            if isinstance(node, ast.Constant) and type(node.value) is int and node.value > 0:
                start, _ = self._span(node)
                edits.append(Edit("negation", start, start, "-"))
            if isinstance(node, ast.BinOp) and type(node.op) in _LOST:
                written, others = _LOST[type(node.op)]
                edits += self._between("arithmetic", node.left, node.right, written, others)
            for value in self._truth_values(node):
                if not isinstance(value, (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Constant)):
                    start, _ = self._span(value)
                    edits.append(Edit("not", start, start, "not "))
        return edits

    def _nodes(self, function: ast.FunctionDef) -> Iterator[ast.AST]:
        """Nodes of the body outside f-strings, whose positions are not reliable on every Python."""
        todo: list[ast.AST] = list(reversed(function.body))
        while todo:
            node = todo.pop()
            if isinstance(node, ast.JoinedStr):
                continue
            yield node
            todo.extend(reversed(list(ast.iter_child_nodes(node))))

    def _names(self, function: ast.FunctionDef) -> list[str]:
        arguments = function.args
        names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        names += [
            node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        ]
        return [name for name in dict.fromkeys(names) if name not in ("self", "cls")]

    def _truth_values(self, node: ast.AST) -> list[ast.expr]:
        if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
            return [node.test]
        if isinstance(node, ast.BoolOp):
            return node.values
        if isinstance(node, ast.comprehension):
            return node.ifs
        if isinstance(node, ast.Return) and node.value is not None:
            return [node.value]
        return []

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.offsets[node.lineno - 1] + node.col_offset, self.offsets[node.end_lineno - 1] + node.end_col_offset

    def _between(
        self, kind: str, left: ast.expr, right: ast.expr, operator: str, others: tuple[str, ...]
    ) -> list[Edit]:
        """Replace the operator written between two operands; none where it does not stand there exactly once."""
        start, end = self._span(left)[1], self._span(right)[0]
        pattern = re.escape(operator).replace(r"\ ", r"[ ]+")
        if operator[0].isalpha():
            pattern = rf"\b{pattern}\b"
        matches = list(re.finditer(pattern, self.source[start:end]))
        if len(matches) != 1:
            return []
        first, last = matches[0].span()
        return [Edit(kind, start + first, start + last, other) for other in others]

    def _operator_edits(self, node: ast.AST) -> list[Edit]:
        edits: list[Edit] = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
                written, others = _COMPARE[type(operator)]
                edits += self._between("compare", left, right, written, others)
        elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            formats = isinstance(node.op, ast.Mod) and isinstance(node.left, (ast.Constant, ast.JoinedStr))
            if not formats:
                written, others = _ARITHMETIC[type(node.op)]
                edits += self._between("arithmetic", node.left, node.right, written, others)
        elif isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC:
            written, others = _ARITHMETIC[type(node.op)]
            assignments = tuple(other + "=" for other in others)
            edits += self._between("augmented", node.target, node.value, written + "=", assignments)
        elif isinstance(node, ast.BoolOp):
            written, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:], strict=False):
                edits += self._between("boolean", left, right, written, (other,))
        return edits

    def _value_edits(self, node: ast.AST) -> list[Edit]:
        if isinstance(node, ast.Constant):
            start, end = self._span(node)
            if type(node.value) is bool:
                return [Edit("constant", start, end, str(not node.value))]
            if type(node.value) is int and self.source[start:end].isdigit() and node.value <= MAX_CONSTANT:
                return [
                    Edit("constant", start, end, str(value)) for value in (node.value + 1, node.value - 1) if value >= 0
                ]
        elif isinstance(node, ast.UnaryOp):
            start, end = self._span(node)
            if isinstance(node.op, ast.Not):
                match = re.match(r"not\b[ ]*", self.source[start:end])
                return [Edit("not", start, start + match.end(), "")] if match else []
            if isinstance(node.op, ast.USub):
                return [Edit("negation", start, start + 1, "")]
        return []

    def _condition_edits(self, node: ast.AST) -> list[Edit]:
        if not isinstance(node, (ast.If, ast.While, ast.IfExp)):
            return []
        if isinstance(node.test, (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Constant)):
            return []
        start, _ = self._span(node.test)
        return [Edit("not", start, start, "not ")]

    def _statement_edits(self, node: ast.AST) -> list[Edit]:
        if isinstance(node, ast.Return) and isinstance(node.value, (ast.Name, ast.Constant)):
            start, end = self._span(node.value)
            return [Edit("return", start, end, "None")] if self.source[start:end] != "None" else []
        if isinstance(node, (ast.Break, ast.Continue)):
            start, end = self._span(node)
            return [Edit("jump", start, end, "continue" if isinstance(node, ast.Break) else "break")]
        return []

    def _call_edits(self, node: ast.AST) -> list[Edit]:
        if not isinstance(node, ast.Call):
            return []
        edits: list[Edit] = []
        callee = node.func
        name = callee.attr if isinstance(callee, ast.Attribute) else callee.id if isinstance(callee, ast.Name) else ""
        for sibling in _SIBLING_NAMES.get(name, ()):
            end = self._span(callee)[1]
            edits.append(Edit("call", end - len(name), end, sibling))
        if len(node.args) < 2 or name in _ORDER_FREE_CALLS:
            return edits
        first, second = node.args[:2]
        if isinstance(first, ast.Starred) or isinstance(second, ast.Starred):
            return edits
        (a, b), (c, d) = self._span(first), self._span(second)
        text = self.source
        if d - a <= MAX_SWAP_CHARACTERS and b <= c and text[a:b] != text[c:d]:
            edits.append(Edit("swap", a, d, text[c:d] + text[b:c] + text[a:b]))
        return edits
