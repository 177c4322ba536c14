"""Two lists of ids and the dataset's rows become two task files of the benchmark's shape, each with its identity."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from swerve.environments.identity import Identity, write_identity
from swerve.environments.r2egym.reference import PARAMETERS, metadata_of, reference_line, row_of, task_of
from swerve.environments.r2egym.rows import Row, read_records, read_row
from swerve.telemetry import atomic_file
from swerve.types import SwerveError

_NUM_NAMED = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """A task file that was written.

    Attributes:
        path: Where.
        identity: What it is.
    """

    path: Path
    identity: Identity


def read_ids(path: Path) -> list[str]:
    """The ids of a list in its order: one a line, blank lines and lines that begin with `#` left out.

    Raises:
        SwerveError: There is no such file, it holds none, or one twice.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SwerveError(f"{path}: no list of ids that can be read: {error}") from None
    first: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        name = line.strip()
        if not name or name.startswith("#"):
            continue
        if name in first:
            raise SwerveError(f"{path}:{number}: id '{name}' is already on line {first[name]}")
        first[name] = number
    if not first:
        raise SwerveError(f"{path}: holds no ids")
    return list(first)


def convert(rows: Sequence[Path], lists: dict[str, Path], directory: Path, name: str = "r2egym") -> list[Converted]:
    """Write `<name>_<split>.jsonl` per list, in the list's order; the same input always gives the same bytes.

    Args:
        rows: Files of the dataset's rows, or task files made of such rows.
        lists: File of ids per split.
        directory: Where the files go.
        name: Their names begin with it.

    Returns:
        What was written, in the order of the lists.

    Raises:
        SwerveError: An id is in two lists, has no row or two, or a row is at fault.
        MachineError: A file cannot be written.
    """
    ids = {split: read_ids(path) for split, path in lists.items()}
    owner: dict[str, str] = {}
    for split, names in ids.items():
        for instance_id in names:
            if instance_id in owner:
                both = f"{lists[owner[instance_id]]} and in {lists[split]}"
                raise SwerveError(f"id '{instance_id}' is in {both}: what is trained on cannot be held out")
            owner[instance_id] = split
    found = _find(rows, owner)
    missing = [instance_id for instance_id in owner if instance_id not in found]
    if missing:
        more = f" and {len(missing) - _NUM_NAMED} more" if len(missing) > _NUM_NAMED else ""
        places = ", ".join(map(str, rows))
        raise SwerveError(f"{places}: no rows for {', '.join(missing[:_NUM_NAMED])}{more}")
    for instance_id, split in owner.items():
        where, row = found[instance_id]
        try:
            task_of(row, instance_id, split, row.base_commit(), row.record["problem_statement"])
        except SwerveError as fault:
            raise SwerveError(f"{where}: {fault}") from None
    written = []
    for split, names in ids.items():
        path = directory / f"{name}_{split}.jsonl"
        with atomic_file(path) as file:
            for instance_id in names:
                line = reference_line(found[instance_id][1], instance_id, split)
                file.write(json.dumps(line, sort_keys=True, separators=(",", ":")).encode() + b"\n")
        written.append(Converted(path=path, identity=write_identity(path)))
    return written


def _find(rows: Sequence[Path], wanted: Iterable[str]) -> dict[str, tuple[str, Row]]:
    """The row of each id that has one, with its place; only those are kept in memory."""
    by_name: dict[str, str] = {}
    for instance_id in wanted:
        for name in _spellings(instance_id):
            if by_name.setdefault(name, instance_id) != instance_id:
                raise SwerveError(f"ids '{by_name[name]}' and '{instance_id}' stand for the same row")
    found: dict[str, tuple[str, Row]] = {}
    for path in rows:
        for number, record in read_records(path):
            where = f"{path}:{number}"
            try:
                row = row_of(metadata_of(record)) if PARAMETERS in record else read_row(record)
            except SwerveError as fault:
                raise SwerveError(f"{where}: {fault}") from None
            ids = sorted({by_name[name] for name in row.names() if name in by_name})
            if len(ids) > 1:
                raise SwerveError(f"{where}: ids '{ids[0]}' and '{ids[1]}' stand for the same row")
            for instance_id in ids:
                if instance_id in found:
                    raise SwerveError(f"{where}: id '{instance_id}' is already that of {found[instance_id][0]}")
                found[instance_id] = (where, row)
    return found


def _spellings(instance_id: str) -> set[str]:
    """An id as rows answer to it: as it stands, and without the organisation of its repository."""
    lower = instance_id.lower()
    return {lower, re.sub(r"^[^_]+(?:_[^_]+)*__(?=.*-[0-9a-f]{7,40}$)", "", lower)}
