"""The files of a batch: requests, checked before anything is asked, and results, which survive any end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import msgspec

from sapwood.srt.errors import ConfigError, SapwoodError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
SYNC_SECONDS = 2.0
MAX_TOLD = 3
"""Wrong lines named in one refusal."""
_NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Request(NamedTuple):
    """One line of requests: where it is in the file, so that bodies need not be kept in memory."""

    custom_id: str
    url: str
    path: Path
    begin: int
    size: int

    def body(self) -> bytes:
        """The body as it stands in the file. Raises ConfigError if the file is not what it was."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.begin)
                return bytes(_line(file.read(self.size)).body)
        except (OSError, *_NO_JSON) as e:
            raise ConfigError(f"cannot read the request {self.custom_id!r} in {self.path}: {e}") from None


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Streamed(msgspec.Struct):
    stream: bool | None = None


class _Response(msgspec.Struct):
    status_code: int
    request_id: str | None
    body: msgspec.Raw


class _Result(msgspec.Struct):
    id: str
    custom_id: str
    response: _Response | None
    error: Any


def _line(text: bytes) -> _Line:
    return msgspec.json.decode(text, type=_Line)


def read_requests(path: Path) -> list[Request]:
    """Every request of a file. Raises ConfigError naming the lines that are none, or come twice."""
    requests: list[Request] = []
    seen: dict[str, int] = {}
    wrong: list[str] = []
    _refuse_endless(path)
    try:
        with path.open("rb") as file:
            for number, begin, text in _lines(file):
                try:
                    line = _checked(text)
                    if line.custom_id in seen:
                        first = seen[line.custom_id]
                        raise ValueError(f"custom_id {line.custom_id!r} is that of line {first} too")
                except (*_NO_JSON, ValueError) as e:
                    wrong.append(f"line {number}: {e}")
                    continue
                seen[line.custom_id] = number
                requests.append(Request(line.custom_id, line.url, path, begin, len(text)))
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}") from None
    if wrong:
        more = f" (and {len(wrong) - MAX_TOLD} more)" if len(wrong) > MAX_TOLD else ""
        raise ConfigError(f"{path} is no batch of requests: {'; '.join(wrong[:MAX_TOLD])}{more}")
    return requests


def _refuse_endless(path: Path) -> None:
    """Both files are read to their end, IN more than once: a device or a pipe will not do."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is no regular file")


def _lines(file: IO[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """Number, place and text of every line that is not blank."""
    begin = 0
    for number, text in enumerate(file, 1):
        if text.strip():
            yield number, begin, text
        begin += len(text)


def _checked(text: bytes) -> _Line:
    line = _line(text)
    if not line.custom_id:
        raise ValueError("custom_id is empty")
    if line.method != "POST":
        raise ValueError(f"method must be POST, got {line.method!r}")
    if line.url not in URLS:
        raise ValueError(f"url must be {', '.join(URLS[:-1])} or {URLS[-1]}, got {line.url!r}")
    if not bytes(line.body).lstrip().startswith(b"{"):
        raise ValueError("body must be an object")
    with contextlib.suppress(msgspec.ValidationError):  # the server says what else is wrong with it
        if msgspec.json.decode(line.body, type=_Streamed).stream:
            raise ValueError("body: stream is not for a batch")
    return line


class Results:
    """The file of results, held by one process. `there` maps the custom_id of each result in it to whether it
    succeeded.

    A last line that is torn, as a crash of the machine may leave it, is cut off. Raises ConfigError for a
    file that holds anything else than results.
    """

    def __init__(self, path: Path, requests: Path, retry_failed: bool = False) -> None:
        self.there: dict[str, bool] = {}
        self._path = path
        _refuse_endless(path)
        try:
            if path.exists() and path.samefile(requests):
                raise ConfigError(f"IN and OUT are the same file: {path}")
            self._file = path.open("a+b", buffering=0)
        except OSError as e:
            raise ConfigError(f"cannot write {path}: {e.strerror}") from None
        try:
            self._lock()
            kept = self._read()
            if retry_failed and not all(self.there.values()):
                self._drop_failed(kept)
        except OSError as e:
            self._file.close()
            raise ConfigError(f"cannot write {path}: {e.strerror}") from None
        except BaseException:
            self._file.close()
            raise
        self._synced = time.monotonic()

    def failed_of(self, requests: Iterable[Request]) -> int:
        """How many of `requests` have a result that is an error."""
        return sum(not self.there.get(request.custom_id, True) for request in requests)

    def write(self, request: Request, status: int, request_id: str | None, body: bytes) -> None:
        """Add one result, whole: after this call it survives the end of the process. Raises SapwoodError when
        the disk is full; the next run cuts off what is torn."""
        raw = (
            msgspec.Raw(body)
            if _is_json(body)
            else msgspec.Raw(msgspec.json.encode(body.decode("utf-8", "replace")))
        )
        name = f"batch_req_{os.urandom(12).hex()}"
        result = _Result(name, request.custom_id, _Response(status, request_id, raw), None)
        line = msgspec.json.encode(result).replace(b"\n", b" ") + b"\n"
        try:
            while line:
                line = line[self._file.write(line) or 0 :]
            if time.monotonic() - self._synced > SYNC_SECONDS:
                os.fsync(self._file.fileno())
                self._synced = time.monotonic()
        except OSError as e:
            raise SapwoodError(f"cannot write {self._path}: {e.strerror}; run again to go on") from None
        self.there[request.custom_id] = status == 200

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"another batch writes {self._path}") from None

    def _read(self) -> list[bytes]:
        """Take in what is there; returns its lines."""
        self._file.seek(0)
        lines: list[bytes] = []
        end = 0
        with open(self._file.fileno(), "rb", closefd=False) as reader:
            for number, begin, text in _lines(reader):
                try:
                    result = msgspec.json.decode(text, type=_Result)
                except _NO_JSON as e:
                    if text.endswith(b"\n"):
                        raise ConfigError(f"{self._path}, line {number}, is no result: {e}") from None
                    break
                lines.append(text)
                end = begin + len(text)
                self.there[result.custom_id] = (
                    result.response is not None and result.response.status_code == 200
                )
        if end < self._file.seek(0, os.SEEK_END):
            self._file.truncate(end)
        if lines and not lines[-1].endswith(b"\n"):
            self._file.write(b"\n")
            lines[-1] += b"\n"
        return lines

    def _drop_failed(self, lines: list[bytes]) -> None:
        """Write the file anew without the results that are errors."""
        kept = [line for line in lines if self.there[msgspec.json.decode(line, type=_Result).custom_id]]
        part = self._path.with_name(self._path.name + ".part")
        with part.open("wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self._path)
        self._file.close()
        self._file = self._path.open("a+b", buffering=0)
        self._lock()
        self.there = {name: True for name, good in self.there.items() if good}

    def __enter__(self) -> Results:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            os.fsync(self._file.fileno())
        self._file.close()


def _is_json(body: bytes) -> bool:
    try:
        msgspec.json.decode(body)
    except _NO_JSON:
        return False
    return True
