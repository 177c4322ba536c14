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


def mutants(release: Release) -> Iterator[list[Candidate]]:
    """Per function of a release, the ways to break it in one place."""
    for path in release.layout.sources:
        try:
            text = release.text(path)
            tree = parse(text)
        except (SyntaxError, ValueError):
            continue
        lines = text.split("\n")
        for node, qualname in definitions(tree, ""):
            segment = _dedented(lines[node.lineno - 1 : node.end_lineno], node.col_offset)
            if segment is None:
                continue
            try:
                edits = sites(segment)
            except (SyntaxError, ValueError):
                continue
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            found = []
            for edit in edits:
                broken = _in_file(lines, node.lineno, node.col_offset, segment, edit)
                if broken is not None:
                    mutation = Mutation(
                        kind=edit.kind,
                        line=node.lineno + line_of(segment, edit) - 1,
                        before=segment[edit.start : edit.end],
                        after=edit.text,
                    )
                    found.append(
                        Candidate(
                            key=f"{path}:{node.lineno}:{edit.start}:{edit.end}:{edit.text}",
                            files={path: broken},
                            place=f"{path}:{first}",
                            file=path,
                            line=node.lineno,
                            qualname=qualname,
                            mutation=mutation,
                        )
                    )
            yield found


def _dedented(lines: list[str], margin: int) -> str | None:
    """Lines of one function without their margin, or `None` where one does not have it."""
    if not all(line[:margin].isspace() or not line.strip() or not margin for line in lines):
        return None
    return "\n".join(line[margin:] for line in lines) + "\n"


def _in_file(lines: list[str], first: int, margin: int, segment: str, edit: Edit) -> str | None:
    """Text of the file with one function changed, or `None` where it no longer parses."""
    changed = apply(segment, edit).split("\n")[:-1]
    number = line_of(segment, edit) - 1
    line = lines[first - 1 + number]
    text = "\n".join([*lines[: first - 1 + number], line[:margin] + changed[number], *lines[first + number :]])
    try:
        parse(text)
    except (SyntaxError, ValueError):
        return None
    return text


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
