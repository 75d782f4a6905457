"""Decodes the bytes of a text file, and reports which encoding was assumed."""

from __future__ import annotations

import codecs
import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

from guozhuang.errors import UsageError, explain

# UTF-32's little-endian mark begins with UTF-16's, so UTF-32 must be tested first.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass(frozen=True)
class Decoded:
    """The decoded text of a file, and the encoding by which it was decoded.

    Attributes:
        text: the decoded text; undecodable bytes appear in it as lone surrogates, U+DC80 + (byte - 0x80).
        encoding: Python's name of the encoding used.
        assumed: a sentence for the log if the encoding was a guess, else empty.
    """

    text: str
    encoding: str
    assumed: str


def read_bytes(path: Path) -> bytes:
    """Return the whole content of a file, decompressed if it is gzip (recognised by its first bytes, whatever its name).

    Raises:
        UsageError: the file is missing, unreadable, or a damaged gzip file.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(
            explain(f"cannot read {path}: {error.strerror}", fix="give the path of a file that this user can read")
        ) from None
    if data[:2] != b"\x1f\x8b":
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(
            explain(f"{path} is a damaged gzip file: {error}", fix="copy or download the file again")
        ) from None


def decode(data: bytes, path: Path, encoding: str | None = None) -> Decoded:
    """Decode the bytes of a file by the given encoding; if it is None, by a detected one.

    Detection: a byte-order mark; UTF-16 by its NUL bytes; UTF-8; UTF-8 with a few bad bytes; for text that is mostly ASCII,
    Windows-1252 (which contains all of printable ISO-8859-1); ``assumed`` reports that guess. Text that is mostly not ASCII and
    not Unicode could be in any of dozens of encodings: the one in which charset-normalizer recognises a language is
    used, and reported too; if it recognises none, this raises.

    Args:
        data: the bytes, unpacked.
        path: path of the file, for errors.
        encoding: a name Python knows, or None.

    Raises:
        UsageError: an unknown name, no encoding detected, or text that cannot be decoded into lines.
    """
    if encoding is not None:
        try:
            name = codecs.lookup(encoding).name
            b"".decode(name)
        except LookupError:
            raise UsageError(
                explain(
                    "no such text encoding", value=encoding, fix="use a name Python knows, e.g. utf-8, cp1252, gb18030"
                )
            ) from None
        return Decoded(_text(data, name, path).removeprefix("\ufeff"), name, "")
    for mark, name in _MARKS:
        if data.startswith(mark):
            return Decoded(_text(data, name, path), name, "")
    name = _utf16(data)
    if name:
        return Decoded(_text(data, name, path), name, f"{path}: read as {name} (by its NUL bytes; it has no mark)")
    try:
        return Decoded(data.decode("utf-8"), "utf-8", "")
    except UnicodeDecodeError:
        pass
    text = data.decode("utf-8", "surrogateescape")
    num_bad = sum("\udc80" <= character <= "\udcff" for character in text)
    num_good = sum(character > "\x7f" for character in text) - num_bad
    if num_good > num_bad:
        return Decoded(text, "utf-8", "")
    if num_bad > 0.2 * len(data):
        name = _recognised(data)
        if name:
            assumed = (
                f"{path}: not Unicode, read as {name}, in which its language is recognised; --encoding says otherwise"
            )
            return Decoded(_text(data, name, path), name, assumed)
        what = f"{path} is not Unicode, and its encoding cannot be told from its bytes"
        fix = "name it: --encoding gb18030, shift_jis, euc_kr, cp1251, koi8-r or another"
        raise UsageError(explain(what, fix=fix))
    name = "latin-1" if set(data) & {0x81, 0x8D, 0x8F, 0x90, 0x9D} else "cp1252"
    return Decoded(data.decode(name), name, f"{path}: not UTF-8, read as {name}; --encoding says otherwise")


def bad_bytes(text: str) -> str:
    """Return the first byte in ``text`` that ``decode`` could not decode, as "0x93"; "" if there is none."""
    for character in text:
        if "\udc80" <= character <= "\udcff":
            return f"0x{ord(character) - 0xDC00:02x}"
    return ""


def _recognised(data: bytes) -> str:
    """Return the encoding in which charset-normalizer recognises a language; empty if none, or without the package."""
    try:
        import charset_normalizer
    except ImportError:
        return ""
    lines = data[: 1 << 16].rpartition(b"\n")[0] if len(data) > 1 << 16 else data  # a cut may split a character
    best = charset_normalizer.from_bytes(lines).best()
    return codecs.lookup(best.encoding).name if best is not None and best.coherence > 0 else ""


def _utf16(data: bytes) -> str:
    """Return the name of UTF-16 without a byte-order mark if every second byte is NUL, as in Latin text; else ""."""
    sample = data[: 1 << 16]
    half = len(sample) // 2
    if half and len(data) % 2 == 0:
        even, odd = sample[0::2].count(0), sample[1::2].count(0)
        if odd > 0.4 * half and even < 0.01 * half:
            return "utf-16-le"
        if even > 0.4 * half and odd < 0.01 * half:
            return "utf-16-be"
    return ""


def _text(data: bytes, encoding: str, path: Path) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        first = error
    if not encoding.startswith(("utf-16", "utf-32")):
        try:
            return data.decode(encoding, "surrogateescape")
        except UnicodeDecodeError as error:  # a bad pair may end in an ASCII byte, which no surrogate can mark
            first = error
    line = data[: first.start].decode(encoding, "ignore").count("\n") + 1
    what = f"{path}:{line}: byte 0x{data[first.start]:02x} is not {encoding}"
    fix = "name the file's true encoding with --encoding, or mend the file"
    raise UsageError(explain(what, fix=fix))
