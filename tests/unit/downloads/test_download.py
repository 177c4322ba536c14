"""Files arrive whole, verified and once, whatever the network does; and nothing else arrives."""

import hashlib
import io
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hub_server import COMMIT, REPOSITORY, Fault, Hub, serve
from swerve.downloads import HubSource, ManifestSource, Outcome, Web, download, verify
from swerve.downloads.listing import Listing, RemoteFile, checked
from swerve.downloads.web import Redirects
from swerve.types import MachineError, SwerveError

BIG = random.Random(1).randbytes(300_000)
FILES = {"config.json": b"{}\n", "empty": b"", "sub/a b%#é.bin": b"odd name", "big.bin": BIG}
NUM_BYTES = sum(map(len, FILES.values()))
OTHER = random.Random(2).randbytes(len(BIG))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with serve(Hub(files=dict(FILES), large={"big.bin"})) as served:
        yield served


Fetch = Callable[..., Outcome]


@pytest.fixture
def fetch(hub: Hub, tmp_path: Path) -> Fetch:
    """Downloads the repository into `tmp_path / "out"`."""

    def run(
        revision: str = COMMIT, *, out: Path | None = None, said: list[str] | None = None, **options: Any
    ) -> Outcome:
        source = options.pop("source", None) or HubSource("models", REPOSITORY, revision, hub.url)
        chosen = {key: options.pop(key) for key in ("include", "workers", "progress") if key in options}
        web = Web(
            **{"first_wait_s": 0.01, "token_for": hub.url, "say": (said if said is not None else []).append, **options}
        )
        return download(source, out or tmp_path / "out", web=web, **chosen)

    return run


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but the record, by path."""
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    record = json.loads(files.pop("download.json"))
    assert record["complete"] is True
    return files


def test_a_repository_arrives_whole_and_a_second_call_asks_nothing(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    shown: list[tuple[int, int]] = []
    outcome = fetch(progress=lambda done, total: shown.append((done, total)))
    assert contents(tmp_path / "out") == FILES
    assert (outcome.fetched, outcome.fetched_bytes, outcome.revision) == (4, NUM_BYTES, COMMIT)
    assert shown[-1] == (NUM_BYTES, NUM_BYTES)
    record = json.loads((tmp_path / "out/download.json").read_text())
    assert (record["source"], record["revision"], record["requested"]) == (f"models/{REPOSITORY}", COMMIT, COMMIT)
    assert {"path": "big.bin", "size": len(BIG), "sha256": hashlib.sha256(BIG).hexdigest()} in record["files"]
    hub.asked.clear()
    again = fetch()
    assert (again.fetched, again.fetched_bytes, hub.asked) == (0, 0, [])


def test_datasets_have_addresses_of_their_own(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    fetch(source=HubSource("datasets", REPOSITORY, COMMIT, hub.url))
    assert contents(tmp_path / "out") == FILES
    assert all(path.startswith("/datasets/") for path, _ in hub.files_asked())


def test_a_branch_is_resolved_said_and_recorded(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    said: list[str] = []
    assert fetch("main", said=said).revision == COMMIT
    assert said == [f"models/{REPOSITORY}: main is {COMMIT}"]
    record = json.loads((tmp_path / "out/download.json").read_text())
    assert (record["requested"], record["revision"]) == ("main", COMMIT)
    assert all(f"/resolve/{COMMIT}/" in path for path, _ in hub.files_asked())
    assert fetch().fetched == 0


@pytest.mark.parametrize("seed", range(4))
def test_connections_dropped_anywhere_cost_no_byte_twice(hub: Hub, fetch: Fetch, tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    cuts = [generator.randrange(1, 60_000) for _ in range(5)]
    hub.faults["big.bin"] = [Fault(drop_after=cut, reset=bool(seed % 2)) for cut in cuts]
    said: list[str] = []
    outcome = fetch(said=said, retries=1)
    assert contents(tmp_path / "out") == FILES
    assert len(said) == 5
    if seed % 2 == 0:  # a reset may throw away what is on its way
        assert hub.sent["big.bin"] == len(BIG)
    assert outcome.fetched_bytes == NUM_BYTES
    version = f'"{hashlib.sha256(BIG).hexdigest()[:16]}"'
    asked = [headers for path, headers in hub.files_asked() if path.endswith("big.bin")]
    assert [headers.get("If-Range") for headers in asked] == [None] + [version] * 5


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        ([Fault(status=503), Fault(status=500), Fault(status=408)], "the server answers 503 Service Unavailable"),
        ([Fault(status=429, retry_after="0")], "the server answers 429"),
        ([Fault(drop_after=0)] * 3, "the connection was dropped after 0 of 300000 bytes"),
        ([Fault(drop_after=9_000), Fault(ignore_range=True, drop_after=8_000), Fault()], "dropped after 8000 of"),
        (
            [Fault(drop_after=9_000), Fault(shift=10)],
            "asked for bytes from 9000 on, the server sends others: bytes 9010-",
        ),
        (
            [Fault(drop_after=9_000), Fault(shift=-10)],
            "asked for bytes from 9000 on, the server sends others: bytes 8990-",
        ),
        ([Fault(drop_after=9_000), Fault(status=416)], "the server answers 416"),
        ([Fault(drop_after=9_000, content=OTHER, etag='"old"')], "dropped after 9000"),
        ([Fault(drop_after=9_000, content=OTHER, etag='W/"old"')], "bytes 9000-299999/300000"),
        ([Fault(drop_after=9_000, content=OTHER, etag='"fixed"'), Fault(etag='"fixed"')], "starts over"),
    ],
    ids=[
        "5xx",
        "429",
        "nothing",
        "no_ranges",
        "ahead",
        "behind",
        "416",
        "changed",
        "changed_weak",
        "changed_in_secret",
    ],
)
def test_what_passes_is_waited_out(hub: Hub, fetch: Fetch, tmp_path: Path, faults: list[Fault], told: str) -> None:
    hub.faults["big.bin"] = list(faults)
    said: list[str] = []
    fetch(said=said)
    assert contents(tmp_path / "out") == FILES
    assert any(told in line for line in said), said


def test_the_server_says_how_long_to_wait(hub: Hub, fetch: Fetch) -> None:
    hub.faults["config.json"] = [Fault(status=429, retry_after="1")]
    said: list[str] = []
    start = time.monotonic()
    fetch(said=said)
    assert time.monotonic() - start >= 1
    assert "again in 1 s (1 of 8)" in said[0]


def test_patience_ends_and_the_next_call_goes_on(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    hub.faults["big.bin"] = [Fault(drop_after=100_000), *[Fault(drop_after=0)] * 3]
    with pytest.raises(MachineError, match=r"big\.bin: .* 3 tries in a row brought nothing: run the same again later"):
        fetch(retries=2)
    assert (tmp_path / "out/big.bin.part").read_bytes() == BIG[:100_000]
    assert json.loads((tmp_path / "out/download.json").read_text())["complete"] is False
    hub.sent.clear()
    hub.faults.clear()
    assert fetch().fetched_bytes <= NUM_BYTES - 100_000
    assert hub.sent["big.bin"] == len(BIG) - 100_000
    assert contents(tmp_path / "out") == FILES


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (Fault(flip=1_000), r"big\.bin: sha256 is [0-9a-f]{64}, expected [0-9a-f]{64}: removed"),
        (Fault(content=OTHER), r"big\.bin: sha256 is [0-9a-f]{64}, expected"),
        (Fault(content=BIG[:-1]), r"big\.bin: the server has 299999 bytes, expected 300000: it is another file"),
        (Fault(content=BIG + b"!"), r"big\.bin: the server has 300001 bytes, expected 300000"),
        (Fault(status=404), r"/big\.bin: 404 Not Found: check names"),
    ],
    ids=["flipped", "another", "short", "long", "gone"],
)
def test_another_file_is_refused_and_leaves_nothing(
    hub: Hub, fetch: Fetch, tmp_path: Path, fault: Fault, told: str
) -> None:
    hub.faults["big.bin"] = [fault]
    with pytest.raises(SwerveError, match=told) as caught:
        fetch()
    assert caught.value.exit_code == 2
    assert not list((tmp_path / "out").glob("big.bin*")) or fault.status
    assert not (tmp_path / "out/big.bin").exists()
    fetch()
    assert contents(tmp_path / "out") == FILES


def test_a_small_file_is_held_against_gits_digest(hub: Hub, fetch: Fetch) -> None:
    hub.faults["config.json"] = [Fault(flip=0)]
    with pytest.raises(SwerveError, match=r"config\.json: git_sha1 is [0-9a-f]{40}, expected [0-9a-f]{40}: removed"):
        fetch()


def test_the_token_stays_with_its_server(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    with serve(Hub(files=hub.files)) as cdn:
        hub.token, hub.cdn = "secret", cdn.url
        hub.files = dict(FILES)
        cdn.files = {path.rsplit("/", 1)[-1]: content for path, content in FILES.items()}
        cdn.faults["big.bin"] = [Fault(drop_after=100_000)]
        fetch(token="secret")
        assert contents(tmp_path / "out") == FILES
        assert all(headers["Authorization"] == "Bearer secret" for _, headers in hub.asked)
        assert not any("Authorization" in headers or "secret" in str(headers) for _, headers in cdn.asked)
        assert [headers.get("Range") for path, headers in cdn.asked if path == "/cdn/big.bin"] == [
            None,
            "bytes=100000-",
        ]
        assert "secret" not in (tmp_path / "out/download.json").read_text()


def test_a_redirect_within_the_server_keeps_the_token(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    del hub.files["sub/a b%#é.bin"]
    hub.token, hub.cdn = "secret", hub.url
    assert fetch(token="secret").fetched == 3
    assert [path for path, _ in hub.asked if path.startswith("/cdn/")]


@pytest.mark.parametrize("target", ["http://mirror.example/x", "ftp://mirror.example/x", "file:///etc/passwd"])
def test_redirects_to_what_can_be_read_on_the_way_are_refused(target: str) -> None:
    request = urllib.request.Request("https://hub.example/x")
    with pytest.raises(SwerveError, match=r"https://hub\.example/x: is redirected to (http|ftp|file)://, which is not"):
        Redirects().redirect_request(request, io.BytesIO(), 302, "Found", {}, target)


def test_private_files_need_a_token_of_the_right_kind(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    hub.token = "secret"
    with pytest.raises(SwerveError, match=r"401 Repository not found: .* set HF_TOKEN, if it is private or gated"):
        fetch()
    with pytest.raises(SwerveError, match=r"401 Repository not found: .* HF_TOKEN may not see it") as caught:
        fetch(token="wrong")
    assert "wrong" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    said: list[str] = []
    Web(token="secret", token_for="http://elsewhere.example", say=said.append)
    assert said == [
        "http://elsewhere.example: the token is not sent, for anybody on the way could read it: use https://"
    ]


def test_a_server_that_is_not_there_is_one_line(fetch: Fetch, hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"cannot be reached: .*refused: check the address and the network"):
        fetch(source=HubSource("models", REPOSITORY, COMMIT, "http://127.0.0.1:1"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "ctrl_c"])
def test_a_process_that_ends_midway_loses_nothing(hub: Hub, fetch: Fetch, tmp_path: Path, number: int) -> None:
    out, pause = tmp_path / "out", threading.Event()
    hub.faults["big.bin"] = [Fault(drop_after=200_000, pause=pause)]
    command = [sys.executable, "-m", "swerve.cli", "checkpoint", "download", REPOSITORY, "--revision", COMMIT]
    process = subprocess.Popen([*command, "--out", str(out), "--endpoint", hub.url], stderr=subprocess.PIPE, text=True)
    part = out / "big.bin.part"
    deadline = time.monotonic() + 60
    others = [out / path for path in FILES if path != "big.bin"]
    while not (part.exists() and part.stat().st_size == 200_000 and all(path.exists() for path in others)):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    with pytest.raises(SwerveError, match="another process runs in it"):
        fetch()
    process.send_signal(number)
    told = process.communicate(timeout=20)[1]
    assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 130), told
    pause.set()
    hub.sent.clear()
    assert fetch().fetched_bytes == len(BIG) - 200_000
    assert hub.sent["big.bin"] == len(BIG) - 200_000
    assert contents(out) == FILES


def test_a_damaged_part_is_found_and_fetched_anew(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    hub.faults["big.bin"] = [Fault(status=404)]
    with pytest.raises(SwerveError):
        fetch()
    (tmp_path / "out/big.bin.part").write_bytes(bytes(200_000))
    said: list[str] = []
    fetch(said=said)
    assert said == ["big.bin: what several tries brought is not the file: starts over"]
    assert contents(tmp_path / "out") == FILES


def test_a_part_that_is_too_long_is_dropped(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    hub.faults["big.bin"] = [Fault(status=404)]
    with pytest.raises(SwerveError):
        fetch()
    (tmp_path / "out/big.bin.part").write_bytes(BIG + b"more")
    fetch()
    assert contents(tmp_path / "out") == FILES


def test_globs_choose_files(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    fetch(include=["*.bin"])
    assert set(contents(tmp_path / "out")) == {"big.bin", "sub/a b%#é.bin"}
    with pytest.raises(SwerveError, match=r"was begun with --include '\*\.bin': say the same again"):
        fetch()
    with pytest.raises(SwerveError, match=r"--include \*\.txt: matches none of the 4 files of models/maker/thing: big"):
        fetch(include=["*.bin", "*.txt"], out=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_folder_holds_one_thing(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    used = tmp_path / "used"
    used.mkdir()
    (used / "mine").touch()
    with pytest.raises(SwerveError, match=r"used: is not empty and has no download\.json: choose another --out"):
        fetch(out=used)
    fetch()
    with pytest.raises(SwerveError, match=f"holds revision {COMMIT}, not {'d' * 40}: choose another --out, or"):
        fetch("d" * 40)
    with pytest.raises(SwerveError, match=r"holds models/maker/thing, not datasets/maker/thing"):
        fetch(source=HubSource("datasets", REPOSITORY, COMMIT, hub.url))
    (tmp_path / "out/config.json").unlink()
    hub.files["big.bin"] = OTHER
    with pytest.raises(SwerveError, match=f"lists other files at {COMMIT} than before"):
        fetch()
    hub.files["big.bin"] = BIG
    assert fetch().fetched == 1


def test_a_folder_is_held_against_its_record_without_a_server(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    fetch()
    out = tmp_path / "out"
    hub.asked.clear()
    assert verify(out)[1] == []
    (out / "config.json").write_bytes(b"[]\n")
    (out / "big.bin").write_bytes(BIG[:-1])
    (out / "empty").unlink()
    faults = verify(out)[1]
    assert [fault.removeprefix(f"{out}/").split(",")[0] for fault in faults] == [
        "big.bin: has 299999 bytes",
        faults[1].removeprefix(f"{out}/").split(",")[0],
        "empty: missing",
    ]
    assert re.fullmatch(r".*/config\.json: git_sha1 is [0-9a-f]{40}, expected [0-9a-f]{40}", faults[1])
    assert hub.asked == []
    with pytest.raises(SwerveError, match=r"(big\.bin|config\.json): .*: delete it to fetch it again"):
        fetch()
    for name in ("big.bin", "config.json"):
        (out / name).unlink()
    assert fetch().fetched == 3
    assert verify(out)[1] == []


def test_no_room_is_said_before_anything_is_fetched(hub: Hub, fetch: Fetch) -> None:
    listing = Listing(
        source="manifest",
        revision="0" * 64,
        base_url=f"{hub.url}/cdn/",
        files=(RemoteFile(path="big.bin", size=1 << 60, algorithm="sha256", digest="0" * 64),),
    )

    class Huge(ManifestSource):
        def listing(self, web: Web) -> Listing:
            return listing

    with pytest.raises(MachineError, match=rf"out: {1 << 60} more bytes are needed, \d+ are free: free some"):
        fetch(source=Huge(f"{hub.url}/none", ""))
    assert hub.asked == []


@pytest.mark.parametrize(
    "path",
    ["../x", "a/../../x", "/etc/x", "a//b", "./a", "", "a\\b", "a\nb", "download.json", "a.part", "b/a.part.etag"],
)
def test_paths_that_lead_out_or_are_ours_are_refused(hub: Hub, fetch: Fetch, tmp_path: Path, path: str) -> None:
    hub.files[path] = b"evil"
    with pytest.raises(SwerveError, match="nothing was fetched"):
        fetch()
    assert list(tmp_path.iterdir()) == []
    assert hub.files_asked() == []


def test_a_path_comes_once() -> None:
    file = RemoteFile(path="a", size=1, algorithm="md5", digest="0" * 32)
    with pytest.raises(SwerveError, match="'a': comes twice"):
        checked([file, file], "list")


def manifest_of(files: dict[str, bytes], **more: object) -> bytes:
    entries = [{"path": p, "size": len(c), "sha256": hashlib.sha256(c).hexdigest()} for p, c in files.items()]
    return json.dumps({**more, "files": entries}).encode()


def test_a_manifest_lists_files_beside_it(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    manifest = manifest_of(FILES)
    digest = hashlib.sha256(manifest).hexdigest()
    hub.files["list.json"] = manifest
    url = f"{hub.url}/cdn/list.json"
    assert fetch(source=ManifestSource(url, "")).revision == digest
    assert contents(tmp_path / "out") == FILES
    hub.asked.clear()
    assert fetch(source=ManifestSource(url, digest)).fetched == 0
    assert hub.asked == []
    hub.files["list.json"] = manifest_of({"config.json": b"{}\n"})
    with pytest.raises(SwerveError, match=r"list\.json: sha256 is [0-9a-f]{64}, expected [0-9a-f]{64}: it has changed"):
        fetch(source=ManifestSource(url, digest), out=tmp_path / "new")
    with pytest.raises(SwerveError, match=r"holds revision .*, not the manifest, now"):
        fetch(source=ManifestSource(url, ""))


def test_the_record_of_a_folder_is_a_manifest(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    fetch()
    fetch(source=ManifestSource(str(tmp_path / "out/download.json"), ""), out=tmp_path / "copy")
    assert contents(tmp_path / "copy") == FILES


@pytest.mark.parametrize("program", ["sha256sum", "md5sum"])
def test_lists_of_sums_are_manifests(hub: Hub, fetch: Fetch, tmp_path: Path, program: str) -> None:
    for path, content in FILES.items():
        (tmp_path / "sums" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sums" / path).write_bytes(content)
    done = subprocess.run([program, *FILES], cwd=tmp_path / "sums", capture_output=True, check=True)
    hub.files["sums"] = done.stdout
    fetch(source=ManifestSource(f"{hub.url}/cdn/sums", ""))
    assert contents(tmp_path / "out") == FILES
    hub.files["config.json"] = b"[]\n"
    with pytest.raises(SwerveError, match=r"config\.json: (sha256|md5) is"):
        fetch(source=ManifestSource(f"{hub.url}/cdn/sums", ""), out=tmp_path / "new")


@pytest.mark.parametrize(
    ("manifest", "told"),
    [
        (b'{"files": []}', "lists no file"),
        (b'{"files": [{"path": "a", "size": 1}]}', r"files\[0\]: a: no digest: one of sha256, git_sha1, md5 is needed"),
        (b'{"files": [{"path": "a", "size": "1", "md5": ""}]}', "a: key size: expected a number of bytes"),
        (b'{"files": [{"path": "a", "size": 1, "md5": "00"}]}', "a: '00' is no md5"),
        (b'{"files": 3}', "key files: expected a list"),
        (b"{", "not the JSON that was expected"),
        (b"hello\n", "line 1: neither JSON nor a line of sha256sum or md5sum"),
        (
            b'{"base_url": "file:///etc", "files": [{"path": "a", "size": 1, "md5": "%s"}]}' % (b"0" * 32),
            "base_url 'file",
        ),
    ],
)
def test_manifests_at_fault(hub: Hub, fetch: Fetch, tmp_path: Path, manifest: bytes, told: str) -> None:
    hub.files["list"] = manifest
    with pytest.raises(SwerveError, match=told):
        fetch(source=ManifestSource(f"{hub.url}/cdn/list", ""))
