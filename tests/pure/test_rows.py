"""Files of labelled texts: what is read back, and how each kind of damage is named."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from guozhuang.errors import UsageError
from guozhuang.workloads.encoding import decode
from guozhuang.workloads.rows import read_table
from guozhuang.workloads.samples import Samples, read_samples

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"

# Anything a person can type, and the characters that tables trip over.
texts = st.text(
    st.one_of(st.sampled_from("\",;\t\n\r|' \u2028\x85"), st.characters(codec="utf-8", exclude_characters="\0")),
    min_size=1,
).filter(lambda text: text.strip().casefold() not in {"", "nan", "-nan", "null", "<na>", "#n/a", "nat"})
labels = st.sampled_from(["neg", "pos", "très bon", "好"])
rows = st.lists(st.tuples(labels, texts), min_size=4, max_size=12)
of_files = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def pairs(samples: Samples) -> list[tuple[str, str]]:
    return list(zip(samples.labels, samples.texts, strict=True))


def error(path: Path, **how: object) -> str:
    with pytest.raises(UsageError) as caught:
        read_samples(path, **how)  # type: ignore[arg-type]
    return str(caught.value)


@of_files
@given(rows=rows, quote_all=st.booleans(), header=st.booleans(), zipped=st.booleans())
@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_delimited_round_trip(tmp_path, suffix, rows, quote_all, header, zipped) -> None:
    out = io.StringIO(newline="")
    writer = csv.writer(
        out, delimiter="," if suffix == "csv" else "\t", quoting=csv.QUOTE_ALL if quote_all else csv.QUOTE_MINIMAL
    )
    writer.writerows([["label", "text"]] * header + list(rows))
    data = out.getvalue().encode()
    path = write(tmp_path / (f"a.{suffix}" + ".gz" * zipped), gzip.compress(data) if zipped else data)
    assert pairs(read_samples(path, quoting="double", header="yes" if header else "no")) == rows
    if header:
        assert pairs(read_samples(path, quoting="double")) == rows


@of_files
@given(rows=rows)
def test_json_lines_round_trip(tmp_path, rows) -> None:
    lines = [json.dumps({"id": i, "text": t, "label": n}, ensure_ascii=i % 2 == 0) for i, (n, t) in enumerate(rows)]
    assert pairs(read_samples(write(tmp_path / "a.jsonl", "\n".join(lines)))) == rows


@of_files
@given(rows=rows)
def test_parquet_round_trip(tmp_path, rows) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table(
        {"idx": list(range(len(rows))), "sentence": [t for _, t in rows], "label": [n for n, _ in rows]}
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    assert pairs(read_samples(tmp_path / "a.parquet")) == rows
    zipped = write(tmp_path / "a.parquet.gz", gzip.compress((tmp_path / "a.parquet").read_bytes()))
    assert pairs(read_samples(zipped)) == rows


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    message = error(write(tmp_path / "a.parquet", b"PAR1"))
    assert "needs the package pyarrow" in message and "guozhuang[text]" in message


def test_parquet_names_the_row(tmp_path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(
        pyarrow.table({"text": ["a", None, "c"], "label": [0, 1, 1]}), tmp_path / "a.parquet"
    )
    assert "a.parquet: row 2: bad row: it has no text" in error(tmp_path / "a.parquet")
    assert "is not a parquet file" in error(write(tmp_path / "b.parquet", b"PAR1 no"))
    assert "is a parquet file" in error(write(tmp_path / "c.csv", (tmp_path / "a.parquet").read_bytes()))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "cp1252"])
def test_encodings_are_detected(tmp_path, encoding) -> None:
    content = "label,text\n" + "a,plain words of some length\nb,naïve café über\n" * 3
    samples = read_samples(write(tmp_path / "a.csv", content.encode(encoding)))
    assert samples.texts[:2] == ["plain words of some length", "naïve café über"]
    assert bool(samples.table.assumed) == (encoding in ("utf-16-le", "utf-16-be", "cp1252"))


@pytest.mark.parametrize("encoding", ["gb18030", "shift_jis", "euc_jp"])
def test_encodings_that_cannot_be_told_are_asked_for(tmp_path, monkeypatch, encoding) -> None:
    monkeypatch.setitem(__import__("sys").modules, "charset_normalizer", None)  # not installed
    path = write(tmp_path / "a.csv", ("a,今日天文学\nb,明日天文学\n" * 4).encode(encoding))
    assert "--encoding" in error(path)
    assert read_samples(path, encoding=encoding).texts[0] == "今日天文学"


CHINESE = ["今日天文学的新发现。科学家在实验室里研究了很多年。", "这部电影非常好看。演员的表演很出色。"]
RUSSIAN = ["Этот фильм очень хороший", "актеры играли прекрасно"]


@pytest.mark.parametrize(("encoding", "texts"), [("gb18030", CHINESE), ("gbk", CHINESE), ("cp1251", RUSSIAN)])
def test_encodings_in_which_a_language_is_recognised(tmp_path, encoding, texts) -> None:
    pytest.importorskip("charset_normalizer")
    content = "".join(f"{label},{text}\n" for label, text in zip("abab", texts * 2, strict=True)).encode(encoding)
    samples = read_samples(write(tmp_path / "a.csv", content * 1000))  # longer than the piece that is looked at
    assert samples.texts[:2] == texts
    assert any("language is recognised" in text for text in samples.table.assumed)


@of_files
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\ufeff")))
@pytest.mark.parametrize("mark", [codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_LE])
def test_a_mark_decides(text, mark) -> None:
    # A NUL first makes UTF-16's mark that of UTF-32: no reader can tell them apart.
    if mark == codecs.BOM_UTF16_LE and text.startswith("\0"):
        return
    name = {3: "utf-8", 4: "utf-32-le"}.get(len(mark), "utf-16-le" if mark[0] == 0xFF else "utf-16-be")
    assert decode(mark + text.encode(name), Path("x")).text == text


def test_header_is_found_or_not(tmp_path) -> None:
    def how(content: str) -> tuple[int, str]:
        samples = read_samples(write(tmp_path / "a.csv", content))
        return len(samples.labels), samples.columns

    assert how("a,one\nb,two\na,three\nb,four\n") == (4, "label column 0, text column 1")
    assert how("id,words\na,one\nb,two\na,three\n") == (3, "label 'id', text 'words', first row taken for a header")
    assert how("text,label\none,a\ntwo,b\n")[1].startswith("label 'label', text 'text'")
    assert how("id,label,author,title,text\n1,a,me,t,one\n2,b,you,u,two\n")[1].startswith(
        "label 'label', text 'title' + 'text'"
    )
    assert how("id,Label,author\n1,a,me\n2,b,you\n")[1].startswith("label 'Label', text 'id' + 'author'")


def test_columns_told(tmp_path) -> None:
    path = write(tmp_path / "a.csv", "n,kind,first,second\n1,a,x,y\n2,b,,z\n3,a,v,w\n")
    assert pairs(read_samples(path, label="kind", text=["first", "second"])) == [("a", "x y"), ("b", "z"), ("a", "v w")]
    assert pairs(read_samples(path, label="1", text=["3", "2"], header="yes")) == [
        ("a", "y x"),
        ("b", "z"),
        ("a", "w v"),
    ]
    assert "no such column (got 'sort')" in error(path, label="sort")
    assert "'n', 'kind', 'first', 'second'" in error(path, label="sort")
    assert "no such column (got '9')" in error(path, label="9")
    assert "one column is both" in error(path, label="kind", text=["kind"])
    assert "has no header" in error(path, label="kind", header="no")


def test_label_until(tmp_path) -> None:
    path = write(tmp_path / "a.txt", "DESC:manner How is it ?\nHUM:ind Who is it ?\n")
    assert pairs(read_samples(path, label_until=":")) == [("DESC", "How is it ?"), ("HUM", "Who is it ?")]
    assert pairs(read_samples(path))[0] == ("DESC:manner", "How is it ?")


def test_delimiters(tmp_path) -> None:
    assert pairs(read_samples(write(tmp_path / "a.csv", "a;1,5\nb;2\na;3\n"))) == [("a", "1,5"), ("b", "2"), ("a", "3")]
    assert pairs(read_samples(write(tmp_path / "a.csv", "a|x\nb|y\na|z\n"), delimiter="pipe"))[0] == ("a", "x")
    assert pairs(read_samples(write(tmp_path / "a.txt", "a\tx y\nb\tz\na\tw\n")))[0] == ("a", "x y")
    assert "not one character" in error(tmp_path / "a.csv", delimiter="||")
    assert "has no delimiter" in error(write(tmp_path / "a.jsonl", "{}"), delimiter=",")
    assert "no column left" in error(write(tmp_path / "a.csv", "x\ny\nx\n"))


def test_quotes_in_tab_separated_files(tmp_path) -> None:
    def read(content: str) -> list[str]:
        return read_samples(write(tmp_path / "a.tsv", content)).texts

    # A quoted passage, alone and at the start of a sentence: ordinary characters.
    assert read('a\t"yes"\nb\t"no" he said\na\tgo\n') == ['"yes"', '"no" he said', "go"]
    # An opening and a closing quote in different rows do not make one cell of two rows.
    assert read('a\t"yes\nb\tno"\na\tgo\n') == ['"yes', 'no"', "go"]
    # Written by a program that quotes what needs it.
    assert read('a\t"he said ""no"""\nb\tyes\na\tgo\n') == ['he said "no"', "yes", "go"]
    assert read('a\t"two\nlines"\nb\tyes\na\tgo\n') == ["two\nlines", "yes", "go"]
    # Written by a program that quotes everything.
    assert read('"a"\t"x"\n"b"\t"y"\n"a"\t"z"\n') == ["x", "y", "z"]


BAD = [
    ("a,x\nb,y,z\na,w\nb,v\n", "a.csv:2: bad row: it has 3 columns where the file has 2"),
    ("a,x\nb\na,w\n", "a.csv:2: bad row: it has 1 columns where the file has 2"),
    ('a,"x\ny\nz"\n,lost\nb,w\na,v\n', "a.csv:4: bad row: it has no label"),
    ("a,x\n\nb,  \na,w\n", "a.csv:3: bad row: it has no text"),
    ("a,x\nb,y\0z\na,w\n", "a.csv:2: bad row: its text has a NUL character"),
    ('a,x\nb,"y"z\na,w\n', "a.csv:2: bad row: its double quotes do not match"),
    ("a,übergroß\na,été\nb,\udce9t\udce9\na,x\n", "a.csv:3: bad row: its text has the byte 0xe9"),
]


@pytest.mark.parametrize(("content", "message"), BAD)
def test_a_bad_row_is_named_or_skipped(tmp_path, content, message) -> None:
    path = write(tmp_path / "a.csv", content.encode("utf-8", "surrogateescape"))
    text = error(path)
    assert message in text and "--bad-rows skip" in text
    samples = read_samples(path, skip_bad=True)
    assert len(samples.skipped) == 1
    assert len(samples.texts) == len(list(csv.reader(io.StringIO(content)))) - 1 - content.count("\n\n")


def test_bad_json_rows(tmp_path) -> None:
    good = '{"label": 1, "text": "x"}'
    for line, problem in [
        ("{", "it is not JSON"),
        ("[1]", "it is not a JSON object"),
        ('{"label": null, "text": "x"}', "it has no label"),
        ('{"text": "x"}', "it has no label"),
        ('{"label": 1, "text": 5}', "its text is a int"),
        ('{"label": [1], "text": "x"}', "its label is a list"),
        ('{"label": 1, "text": "\\ud800"}', "half a surrogate pair"),
        ('{"label": 1, "text": "\\u0000"}', "NUL"),
        ("[" * 100_000, "it is not JSON"),
    ]:
        path = write(tmp_path / "a.jsonl", f"{good}\n\n{line}\n{good}\n")
        assert "a.jsonl:3: bad row: " in error(path) and problem in error(path)
        assert read_samples(path, skip_bad=True).skipped == [3]


def test_missing_values_are_no_classes_and_no_texts(tmp_path) -> None:
    nan = float("nan")
    placed = [
        (1.0, "x", ""),
        (nan, "x", "its label is NaN"),
        ("nan", "x", "its label is 'nan'"),
        ("NULL", "x", "its label is 'NULL'"),
        (float("inf"), "x", "its label is inf"),
        (None, "x", "it has no label"),
        ("  ", "x", "it has no label"),
        (2, nan, "its text is NaN"),
        (2, " null ", "its text is 'null'"),
        (2, "nullify", ""),
        ("none", "y", ""),
        (2.0, "\u00a0", "it has no text"),
    ]
    for i, (label, text, problem) in enumerate(placed):
        path = write(tmp_path / "a.jsonl", json.dumps({"label": label, "text": text}) + '\n{"label": 1, "text": "z"}')
        if problem:
            assert f"a.jsonl:1: bad row: {problem}" in error(path), i
    path = write(tmp_path / "a.json", json.dumps([{"label": n, "text": t} for n, t, _ in placed], indent=1))
    bad = [4 * i + 2 for i, (_, _, problem) in enumerate(placed) if problem]
    shown = ", ".join(map(str, bad[:8]))
    assert "a.json:6: bad row: its label is NaN, which" not in error(path)
    assert f"a.json:6: bad row: its label is NaN; {len(bad)} of 12 rows are bad: lines {shown}, ..." in error(path)
    samples = read_samples(path, skip_bad=True)
    assert pairs(samples) == [("1", "x"), ("2", "nullify"), ("none", "y")] and samples.skipped == bad
    # Of several columns of text one may be missing.
    path = write(
        tmp_path / "b.json", '[{"label": 1, "title": NaN, "text": "x"}, {"label": 2, "title": "a", "text": null}]'
    )
    assert pairs(read_samples(path)) == [("1", "x"), ("2", "a")]


@of_files
@given(rows=rows, indent=st.sampled_from([None, 0, 3]))
def test_json_array_round_trip(tmp_path, rows, indent) -> None:
    objects = [{"text": t, "label": n, "more": [1, {"a": "]"}]} for n, t in rows]
    path = write(tmp_path / "a.json", json.dumps(objects, indent=indent, ensure_ascii=False))
    assert pairs(read_samples(path)) == rows
    in_lines = write(tmp_path / "b.json", "\n".join(json.dumps(each) for each in objects))
    assert pairs(read_samples(in_lines)) == rows


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "a.json is empty"),
        ('[{"label": 1, "text": "x"},\n 5]', "a.json:2: bad row: it is not a JSON object"),
        (
            '[{"label": 1, "text": "x"},\n {"label": }]',
            "a.json:2: the file is not a JSON array: Expecting value at column",
        ),
        (
            '[{"label": 1, "text": "x"}, 5, 6]',
            "a.json: row 2: bad row: it is not a JSON object; 2 of 3 rows are bad: rows 2, 3",
        ),
        (
            '[{"label": 1,\n "text": "x',
            "a.json:2: the file is not a JSON array: Unterminated string starting at column 10",
        ),
        (
            '{"data": [1, 2]}',
            "no column left for the text beside the label. Fix: give each row a label and a text; it has the columns 'data'",
        ),
        ('[{"label": 1, "text": "x"}\n {"label": 2}]', "neither a comma nor ]"),
        ('[{"label": 1, "text": "x"}', "after this element there is ''"),
        ('[{"label": 1, "text": "x"}]\n[]', "something follows its end"),
        ("[" * 100_000, "not a JSON array"),
    ],
)
def test_what_is_no_json_array(tmp_path, content, message) -> None:
    assert message in error(write(tmp_path / "a.json", content))
    if message.endswith("end"):
        assert "it begins with '{'" in error(write(tmp_path / "b.txt", '{"data": []}'), format="json")


def test_files_that_cannot_be_read(tmp_path) -> None:
    assert "is empty" in error(write(tmp_path / "a.csv", ""))
    assert "is empty" in error(write(tmp_path / "a.csv", "\n\r\n  \n"))
    assert "has a header and no rows" in error(write(tmp_path / "a.csv", "label,text\n"), header="yes")
    assert "all 2 are bad" in error(write(tmp_path / "a.csv", "a,\nb,\n"), skip_bad=True)
    assert "cannot read" in error(tmp_path / "none.csv")
    (tmp_path / "folder.csv").mkdir()
    assert "cannot read" in error(tmp_path / "folder.csv")
    assert "cannot tell the format" in error(write(tmp_path / "a.xls", "x"))
    assert "damaged gzip" in error(write(tmp_path / "a.csv.gz", gzip.compress(b"a,x\n" * 99)[:-9]))
    assert "no such text encoding" in error(write(tmp_path / "a.csv", "a,x\n"), encoding="utf-9")
    assert "a.csv:3: a double quote opens here and never closes" in error(
        write(tmp_path / "a.csv", 'a,x\nb,y\na,"z\nb,w\n'), skip_bad=True
    )
    assert "names its columns itself" in error(write(tmp_path / "a.jsonl", '{"label":1,"text":"x"}'), header="no")
    odd = "a,x\nb,y\n".encode("utf-16")[:-1]
    assert "a.csv:2: byte" in error(write(tmp_path / "a.csv", odd))


def test_a_cell_longer_than_the_csv_modules_limit(tmp_path) -> None:
    limit = csv.field_size_limit()
    long = "x" * (limit + 1)
    assert read_samples(write(tmp_path / "a.csv", f"a,{long}\nb,y\na,z\n")).texts[0] == long
    assert csv.field_size_limit() == limit


@pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not here")
@pytest.mark.parametrize(
    ("name", "num_rows", "classes", "first"),
    [
        ("ag_news/train_10k.csv.gz", 10_000, 4, "Update 1: Vivendi"),
        ("ag_news/train_more_desc_only.csv.gz", 9_121, 4, "p2pnet.net News"),
        ("ag_news/test.csv.gz", 7_600, 4, "Fears for T N pension after talks Unions"),
        ("sst2/train.tsv.gz", 67_349, 2, "hide new secretions"),
        ("sst2/dev.tsv.gz", 872, 2, "one long string"),
        ("sst2/test.tsv.gz", 1_821, 2, "no movement"),
        ("trec/train.txt", 5_452, 6, "How did serfdom"),
        ("trec/test.txt", 500, 6, "How far is it"),
        ("sms_spam/sms.tsv", 5_574, 2, "Go until jurong point"),
    ],
)
def test_real_files(name, num_rows, classes, first) -> None:
    samples = read_samples(DATA / name)
    assert (len(samples.texts), len(set(samples.labels)), samples.skipped) == (num_rows, classes, [])
    assert samples.texts[0].startswith(first)
    if "trec/train" in name:
        assert samples.table.encoding == "cp1252"
        assert any("sisterðcity" in text for text in samples.texts)
    if "sms" in name:
        assert sum('"' in text for text in samples.texts) > 100


def test_formats_and_quotes_are_asked_for_by_name(tmp_path) -> None:
    path = write(tmp_path / "data", 'a,"x"\nb,y\na,z\n')
    assert [row.cells for row in read_table(path, "csv").rows] == [["a", "x"], ["b", "y"], ["a", "z"]]
    assert read_table(path, "csv", quoting="none").rows[0].cells == ["a", '"x"']
    with pytest.raises(UsageError, match="has no quotes"):
        read_table(path, "jsonl", quoting="none")
