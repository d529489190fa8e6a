"""Formats of strings that are enforced, as patterns: what they describe is a regular language, or nearly.

`email` has a local part of plain atoms and a host name, `hostname` at most 63 characters a label; `uri` is
RFC 3986 without the newer literal addresses. Leap seconds are left out. Other formats are annotations.
"""

from __future__ import annotations

from sapwood.srt.grammar.form import Pattern

_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = rf"(?:{_YEAR}-{_DAY}|{_LEAP}-02-29)"
_ZONE = r"(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = rf"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,9}})?{_ZONE}"
_OF_DAY = r"T(?:[0-9]{1,9}H(?:[0-9]{1,9}M(?:[0-9]{1,9}S)?)?|[0-9]{1,9}M(?:[0-9]{1,9}S)?|[0-9]{1,9}S)"
_OF_DATE = r"(?:[0-9]{1,9}Y(?:[0-9]{1,9}M(?:[0-9]{1,9}D)?)?|[0-9]{1,9}M(?:[0-9]{1,9}D)?|[0-9]{1,9}D)"
_DURATION = rf"P(?:{_OF_DATE}(?:{_OF_DAY})?|{_OF_DAY}|[0-9]{{1,9}}W)"

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_H = r"[0-9A-Fa-f]{1,4}"
_TAIL = rf"(?:{_H}:{_H}|{_IPV4})"
_IPV6 = (
    rf"(?:(?:{_H}:){{6}}{_TAIL}|::(?:{_H}:){{5}}{_TAIL}|(?:{_H})?::(?:{_H}:){{4}}{_TAIL}"
    rf"|(?:(?:{_H}:){{0,1}}{_H})?::(?:{_H}:){{3}}{_TAIL}|(?:(?:{_H}:){{0,2}}{_H})?::(?:{_H}:){{2}}{_TAIL}"
    rf"|(?:(?:{_H}:){{0,3}}{_H})?::{_H}:{_TAIL}|(?:(?:{_H}:){{0,4}}{_H})?::{_TAIL}"
    rf"|(?:(?:{_H}:){{0,5}}{_H})?::{_H}|(?:(?:{_H}:){{0,6}}{_H})?::)"
)

_PLAIN = r"A-Za-z0-9._~!$&'()*+,;=\-"
_ESCAPE = r"%[0-9A-Fa-f]{2}"
_SEGMENT = rf"(?:[{_PLAIN}:@]|{_ESCAPE})"
_AUTHORITY = rf"(?:(?:[{_PLAIN}:]|{_ESCAPE})*@)?(?:\[{_IPV6}\]|(?:[{_PLAIN}]|{_ESCAPE})*)(?::[0-9]*)?"
_QUERY = rf"(?:\?(?:[{_PLAIN}:@/?]|{_ESCAPE})*)?(?:#(?:[{_PLAIN}:@/?]|{_ESCAPE})*)?"
_ROOTED = rf"/(?:{_SEGMENT}+(?:/{_SEGMENT}*)*)?"
_ROOTLESS = rf"{_SEGMENT}+(?:/{_SEGMENT}*)*"
_URI = rf"[A-Za-z][A-Za-z0-9+.-]*:(?://{_AUTHORITY}(?:/{_SEGMENT}*)*|{_ROOTED}|{_ROOTLESS}|){_QUERY}"

FORMATS: dict[str, Pattern] = {
    name: f"^(?:{pattern})$"
    for name, pattern in {
        "date-time": rf"{_DATE}[Tt]{_TIME}",
        "date": _DATE,
        "time": _TIME,
        "duration": _DURATION,
        "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}",
        "hostname": _HOST,
        "ipv4": _IPV4,
        "ipv6": _IPV6,
        "uuid": r"[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
        "uri": _URI,
        "json-pointer": r"(?:/(?:[^~/]|~[01])*)*",
    }.items()
}
"""The patterns of the formats, each of the whole string."""
