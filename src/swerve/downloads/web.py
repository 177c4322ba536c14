"""Requests over HTTP: a token that stays with its host, redirects, and patience with what passes."""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from email.message import Message
from typing import IO, Any, NoReturn
from urllib.parse import urlsplit

import swerve
from swerve.types import MachineError, SwerveError

_LONGEST_WAIT_S = 60.0
_LONGEST_ASKED_WAIT_S = 600.0
_PASSING = (408, 429)
"""Answers below 500 after which the same request may succeed."""
_LOCAL = ("localhost", "127.0.0.1", "::1")


class PassingFault(Exception):
    """What another try may mend: a dropped connection, a server that is busy.

    Attributes:
        wait_s: Seconds that the server asked to wait; 0 if it did not.
    """

    def __init__(self, cause: str, wait_s: float = 0.0) -> None:
        super().__init__(cause)
        self.wait_s = wait_s


class RangeRefused(PassingFault):
    """The server has no bytes where more were asked for; from the beginning it may."""


class Stopped(Exception):
    """The download was stopped elsewhere: by a fault of another file, or by Ctrl-C."""


class Web:
    """Makes requests."""

    def __init__(
        self,
        *,
        token: str = "",
        token_for: str = "",
        retries: int = 8,
        timeout_s: float = 30.0,
        first_wait_s: float = 0.5,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Sends nothing yet.

        Args:
            token: A secret that lets requests see more; empty for none.
            token_for: URL of the server that gets it, and no other does; `https`, or this machine.
            retries: Tries in a row that may bring nothing, after the first one.
            timeout_s: Seconds without a byte after which a connection counts as dropped.
            first_wait_s: Seconds before the second try; they double from one to the next.
            say: Told of each fault that is waited out.
        """
        secret = bool(token) and (token_for.startswith("https://") or urlsplit(token_for).hostname in _LOCAL)
        self._token, self._origin = (token, _origin(token_for)) if secret else ("", ())
        if token and not secret:
            say(f"{token_for}: the token is not sent, for anybody on the way could read it: use https://")
        self.retries = retries
        self.stop = threading.Event()
        self.say = say
        self._timeout_s = timeout_s
        self._first_wait_s = first_wait_s
        self._reached = False
        self._opener = urllib.request.build_opener(Redirects)

    @contextlib.contextmanager
    def open(self, url: str, headers: Mapping[str, str] | None = None, method: str = "GET") -> Iterator[Any]:
        """One request; what goes wrong within the block while its answer is read is turned into the same faults.

        Raises:
            PassingFault: Another try may succeed.
            MachineError: The server cannot be reached.
            SwerveError: It refuses.
        """
        fixed = {"User-Agent": f"swerve/{swerve.__version__}", "Accept-Encoding": "identity"}
        request = urllib.request.Request(url, headers={**fixed, **(headers or {})}, method=method)
        if self._token and _origin(url) == self._origin:
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                self._reached = True
                if answer.headers.get("Content-Encoding", "identity") != "identity":
                    raise SwerveError(
                        f"{url}: the server compresses what was asked for as it is: use another --endpoint"
                    )
                yield answer
        except urllib.error.HTTPError as error:
            self._reached = True
            with error:
                self._refused(url, error)
        except (OSError, http.client.HTTPException) as error:
            self._broken(url, error)

    def read(self, url: str) -> tuple[bytes, Message]:
        """A whole small answer, and its headers; faults that pass are waited out.

        Raises:
            MachineError: They did not pass.
            SwerveError: The server refuses.
        """
        patience = Patience(self, url)
        while True:
            try:
                with self.open(url) as answer:
                    return answer.read(), answer.headers
            except PassingFault as fault:
                patience.wait(fault, 0)

    def size(self, url: str) -> int:
        """Bytes of a file, as its server says.

        Raises:
            MachineError: The server cannot be reached.
            SwerveError: It does not say.
        """
        patience = Patience(self, url)
        while True:
            try:
                with self.open(url, method="HEAD") as answer:
                    length = answer.headers.get("Content-Length", "")
                if not length.isdecimal():
                    raise SwerveError(f"{url}: the server does not say how long it is: use a manifest with sizes")
                return int(length)
            except PassingFault as fault:
                patience.wait(fault, 0)

    def _refused(self, url: str, error: urllib.error.HTTPError) -> NoReturn:
        told = " ".join((error.headers.get("X-Error-Message") or error.reason or "").split())[:200]
        fault = f"{error.code} {told}".rstrip()
        if error.code in _PASSING or error.code >= 500:
            raise PassingFault(
                f"the server answers {fault}", _asked_wait(error.headers.get("Retry-After", ""))
            ) from None
        if error.code == 416:
            raise RangeRefused(f"the server answers {fault}") from None
        if error.code in (401, 403):
            remedy = "HF_TOKEN may not see it" if self._token else "set HF_TOKEN, if it is private or gated"
            raise SwerveError(f"{url}: {fault}: no such file, or none that you may see: {remedy}") from None
        raise SwerveError(f"{url}: {fault}: check names, revision and address") from None

    def _broken(self, url: str, error: Exception) -> NoReturn:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        text = " ".join(str(cause).split()) or type(cause).__name__
        hopeless = isinstance(cause, ssl.SSLCertVerificationError) or (
            not self._reached and isinstance(cause, socket.gaierror | ConnectionRefusedError)
        )
        if hopeless:
            raise MachineError(f"{url}: cannot be reached: {text}: check the address and the network") from None
        raise PassingFault(text) from None


class Patience:
    """Counts tries in a row that brought nothing, and waits between them."""

    def __init__(self, web: Web, name: str) -> None:
        self._web, self._name = web, name
        self._failed = self._best = 0

    def wait(self, fault: PassingFault, reached: int) -> None:
        """Waits after a try that failed.

        Args:
            fault: Why.
            reached: How far it came; going further than ever before starts the count anew.

        Raises:
            MachineError: There were too many.
            Stopped: Nobody waits for it any more.
        """
        self._failed = 1 if reached > self._best else self._failed + 1
        self._best = max(self._best, reached)
        if self._failed > self._web.retries:
            raise MachineError(
                f"{self._name}: {fault}: {self._failed} tries in a row brought nothing: run the same again later"
            ) from None
        own = min(self._web._first_wait_s * 2 ** (self._failed - 1), _LONGEST_WAIT_S)
        seconds = max(own, fault.wait_s)
        self._web.say(f"{self._name}: {fault}: again in {seconds:.3g} s ({self._failed} of {self._web.retries})")
        if self._web.stop.wait(seconds):
            raise Stopped


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects; the token only within its own origin, and never from https to what can be read on the way."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """The request that follows, or none.

        Raises:
            SwerveError: It would lead where it must not.
        """
        scheme = urlsplit(newurl).scheme
        if scheme not in ("http", "https") or (req.type == "https" and scheme != "https"):
            raise SwerveError(
                f"{req.full_url}: is redirected to {scheme}://, which is not followed: use another address"
            )
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None:
            new.method = req.get_method()
            token = req.unredirected_hdrs.get("Authorization")
            if token and _origin(newurl) == _origin(req.full_url):
                new.add_unredirected_header("Authorization", token)
        return new


def _origin(url: str) -> tuple[object, ...]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _asked_wait(header: str) -> float:
    """Seconds that a `Retry-After` asks for: a number, or a date."""
    if header.strip().isdecimal():
        return min(float(header), _LONGEST_ASKED_WAIT_S)
    try:
        until = email.utils.parsedate_to_datetime(header).timestamp()
    except (TypeError, ValueError):
        return 0.0
    return min(max(0.0, until - time.time()), _LONGEST_ASKED_WAIT_S)
