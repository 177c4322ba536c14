"""What might become a task: every way to break a release in one place, and every way to undo what it mended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from swerve.environments.functions.mutations import Edit, apply, line_of, parse, sites
from swerve.environments.functions.packages import definitions
from swerve.environments.repository.environment import Release
from swerve.types import Mutation


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A broken state of a release.

    Attributes:
        key: Unique within the release.
        files: Texts in place of the release's own; `None` for a file that is not there.
        place: Path and first line of the code that is broken, as surveys name it; empty where whole files are.
        file: The first file that is broken.
        line: Line of the function's `def`, or 0.
        qualname: Of the function, or empty.
        mutation: What was changed, or `None`.
        previous_version: Release that it goes back to, or empty.
    """

    key: str
    files: dict[str, str | None]
    place: str
    file: str
    line: int = 0
    qualname: str = ""
    mutation: Mutation | None = None
    previous_version: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class MutatedFunction:
    """A function of a release and the ways to break it in one place; few of them are ever written out.

    Attributes:
        path: Its file.
        text: Text of the file.
        line: Line of its `def`.
        first: Line of its first decorator, or of its `def`.
        margin: Columns that it is indented by.
        qualname: Dotted name within the module.
        source: Its text without the margin.
        edits: Of `source`.
    """

    path: str
    text: str
    line: int
    first: int
    margin: int
    qualname: str
    source: str
    edits: tuple[Edit, ...]

    @property
    def place(self) -> str:
        """As surveys name it."""
        return f"{self.path}:{self.first}"

    def key(self, edit: Edit) -> str:
        """Of the candidate that an edit leads to."""
        return f"{self.path}:{self.line}:{edit.start}:{edit.end}:{edit.text}"

    def candidate(self, edit: Edit) -> Candidate:
        """The state that an edit leads to."""
        number = line_of(self.source, edit)
        lines = self.text.split("\n")
        row = self.line + number - 2
        lines[row] = lines[row][: self.margin] + apply(self.source, edit).split("\n")[number - 1]
        return Candidate(
            key=self.key(edit),
            files={self.path: "\n".join(lines)},
            place=self.place,
            file=self.path,
            line=self.line,
            qualname=self.qualname,
            mutation=Mutation(kind=edit.kind, line=row + 1, before=self.source[edit.start : edit.end], after=edit.text),
        )


def mutants(release: Release) -> Iterator[MutatedFunction]:
    """The functions of a release that can be broken in one place."""
    for path in release.layout.sources:
        try:
            text = release.text(path)
            tree = parse(text)
        except (SyntaxError, ValueError):
            continue
        lines = text.split("\n")
        for node, qualname in definitions(tree, ""):
            source = _dedented(lines[node.lineno - 1 : node.end_lineno], node.col_offset)
            try:
                edits = tuple(sites(source)) if source is not None else ()
            except (SyntaxError, ValueError):
                continue
            if source is not None and edits:
                yield MutatedFunction(
                    path=path,
                    text=text,
                    line=node.lineno,
                    first=min([node.lineno, *(one.lineno for one in node.decorator_list)]),
                    margin=node.col_offset,
                    qualname=qualname,
                    source=source,
                    edits=edits,
                )


def _dedented(lines: list[str], margin: int) -> str | None:
    """Lines of one function without their margin, or `None` where one does not have it."""
    if not all(line[:margin].isspace() or not line.strip() or not margin for line in lines):
        return None
    return "\n".join(line[margin:] for line in lines) + "\n"


def undone(release: Release, previous: Release) -> list[Candidate]:
    """A release with its sources as they were before: all of them, and each changed file alone.

    Args:
        release: What mended the faults.
        previous: What had them.
    """
    before = {path: previous.text(path) for path in previous.layout.sources}
    after = {path: release.text(path) for path in release.layout.sources}
    changed = {path: before.get(path) for path in sorted({*before, *after}) if before.get(path) != after.get(path)}
    choices = [changed] if changed else []
    choices += [{path: text} for path, text in changed.items()] if len(changed) > 1 else []
    return [
        Candidate(
            key=f"{previous.version}:{','.join(files)}",
            files=files,
            place="",
            file=next(iter(files)),
            previous_version=previous.version,
        )
        for files in choices
    ]
