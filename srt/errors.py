"""The error tree. Each class carries the HTTP status and OpenAI's `type`; each message names the field,
the value and the limit."""

from __future__ import annotations

import msgspec


class ErrorInfo(msgspec.Struct, array_like=True, frozen=True):
    """An error as it travels between processes and, as JSON, to the client."""

    status: int
    type: str
    code: str
    message: str
    param: str | None = None


class SapwoodError(Exception):
    """Root of all errors that a user may see.

    `code` is a stable machine-readable word, `param` the request field or flag at fault.
    """

    status = 500
    type = "server_error"
    default_code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code

    def info(self) -> ErrorInfo:
        return ErrorInfo(self.status, self.type, self.code, self.message, self.param)


class BadRequest(SapwoodError, ValueError):
    """The request cannot be served as it is, and never will be. A ValueError, as programs expect of one."""

    status = 400
    type = "invalid_request_error"
    default_code = "invalid_value"


class ContextTooLong(BadRequest):
    """The prompt can never fit; the message names both numbers."""

    default_code = "context_length_exceeded"


class Unauthorized(SapwoodError):
    """No key, or one that is not known."""

    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class Forbidden(SapwoodError):
    """A good key, but not for this route."""

    status = 403
    type = "permission_error"
    default_code = "permission_denied"


class ModelNotFound(SapwoodError):
    """The request names a model that is not served; the message lists what there is."""

    status = 404
    type = "invalid_request_error"
    default_code = "model_not_found"


class ProgramNotFound(SapwoodError):
    """No request of that program has come, or it has ended."""

    status = 404
    type = "invalid_request_error"
    default_code = "program_not_found"


class RequestTimeout(SapwoodError):
    """The client has not sent its request within the time for that."""

    status = 408
    type = "invalid_request_error"
    default_code = "request_timeout"


class Conflict(SapwoodError):
    """The client's request id is in use by a live request."""

    status = 409
    type = "invalid_request_error"
    default_code = "duplicate_request_id"


class TooLarge(SapwoodError):
    """The body has more bytes than `--max-body-bytes`."""

    status = 413
    type = "invalid_request_error"
    default_code = "request_too_large"


class UnsupportedMediaType(SapwoodError):
    """The body is not declared as JSON."""

    status = 415
    type = "invalid_request_error"
    default_code = "unsupported_media_type"


class Overloaded(SapwoodError):
    """A bounded queue is full; trying again later may work."""

    status = 429
    type = "rate_limit_error"
    default_code = "queue_full"


class Unavailable(SapwoodError):
    """The server is loading, draining, or one of its processes has died."""

    status = 503
    type = "server_error"
    default_code = "unavailable"


class DeadlineExceeded(SapwoodError):
    """The request has not ended within its time; what it had produced is lost unless it was streamed."""

    status = 504
    type = "timeout_error"
    default_code = "deadline_exceeded"


class OwnDeadlineExceeded(DeadlineExceeded):
    """The same, by the time that the request itself has set: the server is not at fault."""

    status = 408


class QueueTimeout(DeadlineExceeded):
    """The request has waited for its turn as long as the server lets it, and has never run."""

    default_code = "queue_timeout"


class OwnQueueTimeout(QueueTimeout):
    """The same, by the time that the request itself has set."""

    status = 408


class ProcessDied(Unavailable):
    """A process of the runtime has ended or fallen silent. `expected`: it said what the user can mend.

    `details` (a traceback) are for the log: the message alone goes to clients.
    """

    default_code = "process_died"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        expected: bool = False,
        details: str = "",
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.expected = expected
        self.details = details
        if details:
            self.add_note(details)


class RankLost(SapwoodError):
    """A rank of the worker cannot go on, as another one has ended: that one is at fault."""


class ConfigError(SapwoodError):
    """A flag or a combination of flags cannot work; printed by the command line, which exits with 2."""

    default_code = "invalid_config"


class ModelError(SapwoodError):
    """A model cannot be found or loaded: names the file or the tensor."""

    default_code = "model_load_failed"


def at_start(error: ProcessDied) -> SapwoodError:
    """The same as a ConfigError or ModelError, if that is what a process could not start with."""
    kind = next((kind for kind in (ConfigError, ModelError) if error.code == kind.default_code), None)
    return error if kind is None else kind(error.message, param=error.param)


_FROM_ELSEWHERE: tuple[type[SapwoodError], ...] = (
    BadRequest, ContextTooLong, ModelNotFound, ProgramNotFound, Conflict, TooLarge, Overloaded, Unavailable,
    ProcessDied, DeadlineExceeded, QueueTimeout,
)  # fmt: skip


def from_info(info: ErrorInfo) -> SapwoodError:
    """The exception for an error of another process, of the class that has its code, or else its status."""
    kinds = [k for k in _FROM_ELSEWHERE if k.default_code == info.code]
    kinds += [k for k in _FROM_ELSEWHERE if (k.status, k.type) == (info.status, info.type)]
    error = (kinds or [SapwoodError])[0](info.message, param=info.param, code=info.code)
    error.status, error.type = info.status, info.type
    return error


def lone_surrogate(error: UnicodeEncodeError, param: str) -> BadRequest:
    """The error for a text that is not Unicode."""
    return BadRequest(
        f"{param} holds a lone surrogate (U+{ord(error.object[error.start]):04X}), which is not a character",
        param=param,
    )


def require_unicode(text: str, param: str) -> str:
    """The text; raises BadRequest if it holds half a character."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise lone_surrogate(e, param) from None
    return text
