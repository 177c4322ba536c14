"""The pre-training corpus: short functions of permissively licensed Python packages, rebuilt from a lock file.

`corpus_lock.jsonl` names wheels by version and SHA-256. They are fetched with pip (which checks the digests), read
without being imported, and reduced to normalised functions: dedented, without decorators, docstring, comments and
blank lines. Nothing of a held-out task may enter: functions equal to one, before or after its mutation and whatever
the identifiers are called, are dropped, and so are the packages that tasks are minted from, vendored copies included.
"""

from __future__ import annotations

import ast
import email
import email.message
import hashlib
import json
import keyword
import lzma
import re
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from swerve.config import cache_directory
from swerve.environments.functions.mutations import normalise_function, sites
from swerve.telemetry import machine_faults, write_atomic
from swerve.types import MachineError, SwerveError

LOCK_PATH = Path(__file__).with_name("corpus_lock.jsonl")
MAX_CHARACTERS = 420
MIN_LINES, MAX_LINES = 3, 20
MAX_LINE_CHARACTERS = 100
MAX_PER_SKELETON = 4
MAX_PER_PACKAGE = 6000

_SKIPPED_FOLDERS = frozenset(
    (
        *("_vendor", "vendor", "vendored", "_vendored", "extern", "external", "_external", "externals", "_externals"),
        *("third_party", "_third_party", "thirdparty", "contrib_vendor"),
        *("tests", "test", "_tests", "testing_data", "locale", "locales", "migrations"),
    )
)
_TASK_PACKAGES = frozenset(
    (
        *("boltons", "cachetools", "cytoolz", "dateutil", "funcy", "glom", "humanize", "inflection", "isodate"),
        *("jmespath", "jsonpointer", "more-itertools", "more_itertools", "natsort", "networkx", "ordered-set"),
        *("ordered_set", "orderedset", "packaging", "parse", "parse_type", "pydash", "pyparsing", "python-dateutil"),
        *("python_slugify", "schema", "semver", "six", "slugify", "sortedcontainers", "sqlparse", "tabulate"),
        *("textdistance", "tlz", "tomlkit", "toolz", "voluptuous", "w3lib", "wcwidth", "webcolors", "xmltodict"),
    )
)
_PERMISSIVE = re.compile(r"\b(MIT|BSD|Apache|PSF|Python Software Foundation|ISC|0BSD|HPND|CC0|Unlicense)\b", re.I)
_RECIPROCAL = re.compile(r"GPL|GNU|MPL|Mozilla|ZPL|Zope|EPL|Eclipse|CDDL|Proprietary|Commercial", re.I)
_DEF = re.compile(r"^[ \t]*def \w+\(")
_WORD = re.compile(r"[A-Za-z_]\w*")
_KEPT_WORDS = frozenset(keyword.kwlist) | frozenset(keyword.softkwlist)


@dataclass(frozen=True, kw_only=True, slots=True)
class LockedWheel:
    """One wheel of the corpus.

    Attributes:
        name: Distribution name.
        version: Release.
        file: File name of the wheel.
        sha256: Hexadecimal SHA-256 of the wheel.
        license: Licence as the wheel's metadata states it.
    """

    name: str
    version: str
    file: str
    sha256: str
    license: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusFunction:
    """One normalised function.

    Attributes:
        package: Distribution it comes from.
        file: Path inside the wheel.
        line: 1-based line of the function in that file.
        text: Its text, without a trailing newline.
        num_sites: Single-site mutations it admits, at least one.
        shape: Digest of the text that does not depend on how identifiers are called.
    """

    package: str
    file: str
    line: int
    text: str
    num_sites: int
    shape: str


def read_lock(path: Path = LOCK_PATH) -> list[LockedWheel]:
    """Read the lock file.

    Raises:
        SwerveError: The file is missing or a line is no lock entry.
    """
    if not path.is_file():
        raise SwerveError(f"{path}: missing corpus lock file; reinstall swerve or name another")
    wheels = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            wheels.append(LockedWheel(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise SwerveError(f"{path}:{number}: not a lock entry ({error})") from None
    return wheels


def lock_wheels(folder: Path) -> list[LockedWheel]:
    """Describe the pure-Python wheels of a folder whose metadata names a permissive licence, by name.

    Wheels under any other licence, or none, are left out.
    """
    wheels = []
    for path in sorted(folder.glob("*-none-any.whl"), key=lambda path: path.name.lower()):
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            metadata = email.message_from_bytes(archive.read(name))
        license_name = _permissive_license(metadata)
        if license_name:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            wheels.append(
                LockedWheel(
                    name=re.sub(r"[-_.]+", "-", metadata["Name"]).lower(),
                    version=metadata["Version"],
                    file=path.name,
                    sha256=digest,
                    license=license_name,
                )
            )
    return wheels


def _permissive_license(metadata: email.message.Message) -> str:
    """The licence of a distribution, or nothing unless every statement about it is permissive."""
    classifiers = [
        value.split(" :: ")[-1]
        for value in metadata.get_all("Classifier", [])
        if value.startswith("License ::") and value != "License :: OSI Approved"
    ]
    statements = [metadata["License-Expression"]] if metadata["License-Expression"] else classifiers
    statements = statements or [(metadata["License"] or "").strip().split("\n")[0][:60]]
    stated = " AND ".join(statements)
    return stated if _PERMISSIVE.search(stated) and not _RECIPROCAL.search(stated) else ""


def fetch(wheels: Iterable[LockedWheel], folder: Path) -> list[Path]:
    """Download the wheels that are not there yet, and check every digest.

    Args:
        wheels: What to fetch.
        folder: Where the wheel files lie afterwards.

    Returns:
        Their paths, in order.

    Raises:
        MachineError: pip could not fetch a wheel.
        SwerveError: A wheel's digest differs from the lock.
    """
    with machine_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
    wheels = list(wheels)
    missing = [wheel for wheel in wheels if not (folder / wheel.file).is_file()]
    if missing:
        with tempfile.TemporaryDirectory() as scratch:
            requirements = Path(scratch) / "requirements.txt"
            requirements.write_text(
                "".join(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n" for wheel in missing),
                encoding="utf-8",
            )
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
            command += ["--only-binary=:all:", "--platform", "any", "--implementation", "py", "--abi", "none"]
            command += ["--python-version", "3.11", "--dest", str(folder), "--requirement", str(requirements)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            cause = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise MachineError(f"pip could not fetch the corpus into {folder}: {cause}")
    paths = []
    for wheel in wheels:
        path = folder / wheel.file
        if hashlib.sha256(path.read_bytes()).hexdigest() != wheel.sha256:
            raise SwerveError(f"{path}: SHA-256 differs from the lock; delete the file to fetch it again")
        paths.append(path)
    return paths


def normalise(segment: str) -> str | None:
    """Reduce the source of one function to its normal form, without a trailing newline.

    Args:
        segment: Whole source lines of a `def`, possibly indented, decorators excluded.

    Returns:
        The text, or `None` if it is not one plain ASCII function of the right size.
    """
    if "\t" in segment or (text := normalise_function(segment)) is None:
        return None
    text = text.rstrip("\n")
    lines = text.split("\n")
    fits = len(text) <= MAX_CHARACTERS and MIN_LINES <= len(lines) <= MAX_LINES
    return text if fits and max(map(len, lines)) <= MAX_LINE_CHARACTERS else None


def skeleton(text: str) -> str:
    """Digest of a function that does not depend on how identifiers are called, nor on white space."""
    names: dict[str, str] = {}

    def rename(match: re.Match[str]) -> str:
        word = match.group()
        return word if word in _KEPT_WORDS else names.setdefault(word, f"v{len(names)}")

    shape = re.sub(r"\s+", " ", _WORD.sub(rename, text))
    return hashlib.sha256(shape.encode()).hexdigest()[:24]


def functions_of(wheel: Path, package: str) -> Iterator[CorpusFunction]:
    """Read the short functions of a wheel without importing it, in the order of the archive."""
    with zipfile.ZipFile(wheel) as archive:
        for file in sorted(archive.namelist()):
            parts = [part.lower() for part in file.removesuffix(".py").split("/")]
            if not file.endswith(".py") or any(part in _SKIPPED_FOLDERS or part in _TASK_PACKAGES for part in parts):
                continue
            if parts[-1].startswith(("test_", "conftest")) or archive.getinfo(file).file_size > 600_000:
                continue
            try:
                source = archive.read(file).decode("utf-8")
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    tree = ast.parse(source)
            except (SyntaxError, ValueError, RecursionError):
                continue
            yield from _functions_of_tree(tree, source.split("\n"), package, file)


def _functions_of_tree(tree: ast.AST, lines: list[str], package: str, file: str) -> Iterator[CorpusFunction]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        num_lines = node.end_lineno - node.lineno
        if not MIN_LINES - 1 <= num_lines <= 60 or not _DEF.match(lines[node.lineno - 1]):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            text = normalise("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            num_sites = len(sites(text)) if text is not None else 0
        if text is not None and num_sites:
            shape = skeleton(text)
            yield CorpusFunction(
                package=package, file=file, line=node.lineno, text=text, num_sites=num_sites, shape=shape
            )


def collect(functions: Iterable[CorpusFunction]) -> list[CorpusFunction]:
    """Keep distinct functions.

    Args:
        functions: All functions, those of one package together.

    Returns:
        The functions kept, in their order. Of functions that differ in identifiers only, at most `MAX_PER_SKELETON`
        are kept, and of one package at most `MAX_PER_PACKAGE`.
    """
    seen: set[bytes] = set()
    shapes: Counter[str] = Counter()
    packages: Counter[str] = Counter()
    kept: list[CorpusFunction] = []
    for function in functions:
        key = hashlib.sha256(re.sub(r"\s+", "", function.text).encode()).digest()[:12]
        if key in seen or shapes[function.shape] >= MAX_PER_SKELETON or packages[function.package] >= MAX_PER_PACKAGE:
            continue
        seen.add(key)
        shapes[function.shape] += 1
        packages[function.package] += 1
        kept.append(function)
    return kept


def _read_all(paths: Iterable[Path], packages: Iterable[str]) -> Iterator[CorpusFunction]:
    """Functions of many wheels, read by all cores, in order."""
    with ProcessPoolExecutor() as pool:
        for functions in pool.map(_read_one, paths, packages):
            yield from functions


def _read_one(path: Path, package: str) -> list[CorpusFunction]:
    return list(functions_of(path, package))


def load_corpus(held_out: Iterable[str], cache: Path | None = None, lock: Path = LOCK_PATH) -> list[CorpusFunction]:
    """Load the corpus, building it on first use.

    Args:
        held_out: Texts that no function may equal, identifiers aside.
        cache: Folder for wheels and the corpus; the user's cache folder by default.
        lock: Lock file.

    Returns:
        The functions, the same list for the same lock and held-out texts.
    """
    cache = cache or cache_directory()
    wheels = read_lock(lock)
    path = cache / f"corpus-{hashlib.sha256(lock.read_bytes()).hexdigest()[:12]}.jsonl.xz"
    if not path.is_file():
        paths = fetch(wheels, cache / "wheels")
        functions = collect(_read_all(paths, [wheel.name for wheel in wheels]))
        lines = "".join(json.dumps(asdict(function), sort_keys=True) + "\n" for function in functions)
        write_atomic(path, lzma.compress(lines.encode(), preset=1))
    forbidden = {skeleton(text) for text in held_out}
    with lzma.open(path, "rt", encoding="utf-8") as stream:
        functions = [CorpusFunction(**json.loads(line)) for line in stream]
    return [function for function in functions if function.shape not in forbidden]
