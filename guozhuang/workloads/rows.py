"""Reads a file into rows of cells, each with its line number, without interpreting labels and text."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from guozhuang.errors import UsageError, explain
from guozhuang.workloads.encoding import decode, read_bytes

FORMATS = ("auto", "csv", "tsv", "jsonl", "json", "parquet", "lines")
QUOTINGS = ("auto", "double", "none")

_NUM_SHOWN = 8  # places of rows in a message

_SUFFIXES = MappingProxyType(
    {
        ".csv": "csv",
        ".tsv": "tsv",
        ".tab": "tsv",
        ".jsonl": "jsonl",
        ".ndjson": "jsonl",
        ".json": "json",
        ".parquet": "parquet",
        ".pq": "parquet",
        ".txt": "lines",
    }
)
_DELIMITERS = MappingProxyType(
    {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "space": " ", "pipe": "|", "colon": ":"}
)


@dataclass(frozen=True, slots=True)
class TableRow:
    """One row of a data file: its line number and its cells, not interpreted yet.

    Attributes:
        line: the line of the file on which it begins, from 1; its number, from 1, where ``Table.counts`` is "row".
        cells: text in csv, tsv and lines; any value in JSON and parquet, None for a missing one.
        problem: why the row cannot be used; empty if it can.
    """

    line: int
    cells: list[object]
    problem: str = ""


@dataclass(frozen=True)
class Table:
    """A data file that was read into rows, with its format and the names of its columns.

    Attributes:
        path: path of the file.
        format: csv, tsv, jsonl, json, parquet or lines.
        names: the names of the columns if the format has them (jsonl, json, parquet), else None.
        rows: in the order of the file; blank lines are left out.
        encoding: the encoding of the file; empty for parquet.
        assumed: sentences for the log about guesses on the file.
        counts: "line", or "row" in a parquet file and in a JSON array with several elements on one line.
    """

    path: Path
    format: str
    names: tuple[str, ...] | None
    rows: list[TableRow]
    encoding: str
    assumed: tuple[str, ...]
    counts: str = "line"

    def place(self, line: int) -> str:
        """Return ``file:line`` or ``file: row 3``, by which errors name a row."""
        return f"{self.path}:{line}" if self.counts == "line" else f"{self.path}: row {line}"

    def places(self, lines: Sequence[int]) -> str:
        """Return where the first of these rows are: ``lines 3, 9, 12, ...``."""
        more = ", ..." if len(lines) > _NUM_SHOWN else ""
        return f"{self.counts}{'s' * (len(lines) > 1)} {', '.join(map(str, lines[:_NUM_SHOWN]))}{more}"


def read_table(
    path: Path, format: str = "auto", delimiter: str | None = None, quoting: str = "auto", encoding: str | None = None
) -> Table:
    """Read csv, tsv, jsonl, json, parquet, or plain lines that begin with their label; gzip is decompressed.

    Args:
        path: the file.
        format: one of FORMATS; "auto" decides by the file name, with or without ``.gz``. In a ``.txt`` file whose first line
            has a tab, tabs separate columns; else a line is a label, the delimiter (a space), and the text. A ``.json`` file is
            one array of objects, or has an object on each line.
        delimiter: one character, or its name (tab, comma, semicolon, space, pipe, colon); None: the format's usual one.
        quoting: whether cells of csv and tsv may be in double quotes, with quotes inside doubled. "auto": yes in csv; in
            tsv only if the quotes of the whole file match.
        encoding: see ``encoding.decode``.

    Raises:
        UsageError: the file cannot be read in this format. Problems of single rows are recorded in the rows instead.
    """
    if format == "auto":
        suffix = (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()
        if suffix not in _SUFFIXES:
            what = f"cannot tell the format of {path} from its name"
            fix = f"name it: --data-format {'|'.join(FORMATS[1:])}"
            raise UsageError(explain(what, value=suffix, fix=fix))
        format = _SUFFIXES[suffix]
        by_name = True
    else:
        by_name = False
    if delimiter is not None:
        delimiter = _DELIMITERS.get(delimiter, delimiter)
        if len(delimiter) != 1 or delimiter in '"\r\n':
            raise UsageError(
                explain("the delimiter is not one character", value=delimiter, fix=f"use {', '.join(_DELIMITERS)} or ;")
            )
        if format in ("jsonl", "json", "parquet"):
            raise UsageError(explain(f"a {format} file has no delimiter", value=delimiter, fix="leave --delimiter out"))
    if quoting != "auto" and format not in ("csv", "tsv"):
        raise UsageError(explain(f"a {format} file has no quotes", value=quoting, fix="leave --quoting out"))
    data = read_bytes(path)
    if format == "parquet":
        if encoding is not None:
            raise UsageError(explain("a parquet file has no encoding", value=encoding, fix="leave --encoding out"))
        names, rows = _parquet(data, path)
        return Table(path, format, names, rows, "", (), "row")
    if data[:4] == b"PAR1":
        raise UsageError(explain(f"{path} is a parquet file", value=format, fix="say --data-format parquet"))
    decoded = decode(data, path, encoding)
    assumed = [decoded.assumed] if decoded.assumed else []
    if format in ("jsonl", "json"):
        is_lines = format == "jsonl" or (by_name and not decoded.text.lstrip().startswith("["))
        placed = list(_json_lines(decoded.text) if is_lines else _json_array(decoded.text, path))
        counts = "line" if len(dict(placed)) == len(placed) else "row"
        if counts == "row":
            placed = [(number, value) for number, (_, value) in enumerate(placed, 1)]
        names, rows = _columns(placed)
        return Table(path, format, names, rows, decoded.encoding, tuple(assumed), counts)
    if format == "lines" and by_name and delimiter is None and "\t" in _first_line(decoded.text):
        format = "tsv"
    if format == "lines":
        rows = list(_label_lines(decoded.text, delimiter or " "))
        return Table(path, format, None, rows, decoded.encoding, tuple(assumed))
    if delimiter is None:
        delimiter = "\t" if format == "tsv" else _sniffed(decoded.text)
        if format == "csv" and delimiter != ",":
            assumed.append(f"{path}: columns are separated by {delimiter!r}, as its first rows suggest")
    if quoting == "auto" and format == "csv":
        quoted = True
    elif quoting == "auto":
        quoted = '"' in decoded.text and _is_quoted(decoded.text, delimiter)
        if quoted:
            assumed.append(f"{path}: cells in double quotes were unquoted; --quoting none keeps the quotes")
    else:
        quoted = quoting == "double"
    rows = _delimited(decoded.text, delimiter, quoted, path)
    return Table(path, format, None, rows, decoded.encoding, tuple(assumed))


def _first_line(text: str) -> str:
    return next((line for line in io.StringIO(text) if line.strip()), "")


def _sniffed(text: str) -> str:
    """Return the delimiter of csv text: a comma, unless it cuts the first rows unequally and another usual one does not."""
    head = list(itertools.islice(io.StringIO(text, newline=""), 50))
    for delimiter in ",\t;|":
        with contextlib.suppress(csv.Error):
            rows = list(csv.reader(head, delimiter=delimiter))
            widths = {len(row) for row in rows[: len(rows) - (len(head) == 50)] if row}  # the last row may be cut
            if len(widths) == 1 and widths != {1}:
                return delimiter
    return ","


def _delimited(text: str, delimiter: str, quoted: bool, path: Path) -> list[TableRow]:
    # The csv module's limit on the length of a cell is global: raise it for this call only.
    limit = csv.field_size_limit(max(len(text) + 1, csv.field_size_limit()))
    try:
        reader = csv.reader(
            io.StringIO(text, newline=""),
            delimiter=delimiter,
            quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE,
            strict=True,
        )
        rows: list[TableRow] = []
        while True:
            line = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                break
            except csv.Error as error:
                if "unexpected end" in str(error):
                    raise UsageError(
                        explain(
                            f"{path}:{line}: a double quote opens here and never closes",
                            fix="mend the row, or say --quoting none if quotes are ordinary characters in this file",
                        )
                    ) from None
                rows.append(TableRow(line, [], f"its double quotes do not match ({error})"))
                continue
            if cells and not (len(cells) == 1 and not cells[0].strip()):
                rows.append(TableRow(line, list(cells)))
    finally:
        csv.field_size_limit(limit)
    return rows


def _is_quoted(text: str, delimiter: str) -> bool:
    """Return whether a tab-separated file was written with quotes: only if that fits it better than plain characters.

    Its quotes must match everywhere. If all rows have the same number of columns only when quotes are parsed, the answer is
    yes; if they have it either way, it is yes when a quoted cell has doubled quotes, or nearly every row has a quoted cell.
    """
    try:
        obeyed = _delimited(text, delimiter, True, Path())
    except UsageError:
        return False
    if any(row.problem for row in obeyed) or len({len(row.cells) for row in obeyed}) > 1:
        return False
    plain = _delimited(text, delimiter, False, Path())
    if len({len(row.cells) for row in plain}) > 1:
        return True
    if len(plain) != len(obeyed):
        return False
    cells = [str(cell) for row in plain for cell in row.cells]
    quoted = [cell[1:-1] for cell in cells if len(cell) > 1 and cell[0] == cell[-1] == '"']
    return any('""' in cell for cell in quoted) or len(quoted) >= 0.9 * len(plain)


def _label_lines(text: str, delimiter: str) -> Iterator[TableRow]:
    for number, line in enumerate(io.StringIO(text, newline=""), 1):
        content = line.rstrip("\r\n").lstrip(" ")
        if content.strip():
            label, found, rest = content.partition(delimiter)
            yield TableRow(
                number, [label, rest], "" if found else f"it has no {delimiter!r} between a label and a text"
            )


#: A line number, and the JSON object that begins there or the reason why it cannot be used.
_Placed = tuple[int, dict[str, object] | str]


def _json_lines(text: str) -> Iterator[_Placed]:
    # Only \n ends a line: JSON text may contain Unicode's other line separators unescaped.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            yield number, f"it is not JSON: {_fault(error)}"
        except (ValueError, RecursionError) as error:
            yield number, f"it is not JSON that can be read: {error}"
        else:
            yield number, value if isinstance(value, dict) else "it is not a JSON object"


def _fault(error: json.JSONDecodeError) -> str:
    return f"{error.msg.removesuffix(' at')} at column {error.colno}"


def _json_array(text: str, path: Path) -> Iterator[_Placed]:
    """Yield the elements of a JSON array; raise UsageError if the text is none, because no later element can be found then."""
    decoder = json.JSONDecoder()
    line, counted = 1, 0

    def skip_blanks(at: int) -> int:
        while at < len(text) and text[at] in " \t\r\n":
            at += 1
        return at

    def not_an_array(what: str, on_line: int | None = None) -> UsageError:
        fix = "give one array of objects, or an object a line with --data-format jsonl"
        return UsageError(explain(f"{path}:{on_line or line}: the file is not a JSON array: {what}", fix=fix))

    at = skip_blanks(0)
    if text[at : at + 1] != "[":
        raise not_an_array(f"it begins with {text[at : at + 1]!r}" if at < len(text) else "it is empty")
    at = skip_blanks(at + 1)
    while text[at : at + 1] != "]":
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise not_an_array(_fault(error), error.lineno) from None
        except (ValueError, RecursionError) as error:
            raise not_an_array(str(error)) from None
        yield line, value if isinstance(value, dict) else "it is not a JSON object"
        at = skip_blanks(at)
        if text[at : at + 1] == ",":
            at = skip_blanks(at + 1)
        elif text[at : at + 1] != "]":
            raise not_an_array(f"after this element there is {text[at : at + 1]!r}, neither a comma nor ]")
    if text[at + 1 :].strip():
        raise not_an_array("something follows its end")


def _columns(placed: Sequence[_Placed]) -> tuple[tuple[str, ...], list[TableRow]]:
    """Return the names of all keys, in the order of their first use, and a row for each object."""
    columns = tuple(dict.fromkeys(name for _, value in placed if isinstance(value, dict) for name in value))
    rows = [
        TableRow(number, [], value)
        if isinstance(value, str)
        else TableRow(number, [value.get(name) for name in columns])
        for number, value in placed
    ]
    return columns, rows


def _parquet(data: bytes, path: Path) -> tuple[tuple[str, ...], list[TableRow]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UsageError(
            explain(
                f"reading {path} needs the package pyarrow, which is not installed",
                fix="pip install 'guozhuang[text]' pyarrow, or save the data as csv, tsv or jsonl",
            )
        ) from None
    try:
        table = pyarrow.parquet.read_table(pyarrow.BufferReader(data))
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(
            explain(f"{path} is not a parquet file that can be read: {error}", fix="write or copy the file again")
        ) from None
    columns = [column.to_pylist() for column in table.columns]
    rows = [TableRow(number, list(cells)) for number, cells in enumerate(zip(*columns, strict=True), 1)]
    return tuple(table.column_names), rows
