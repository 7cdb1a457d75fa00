# SPDX-License-Identifier: Apache-2.0
"""The rewards that Tessera has, against answers made by hand."""

import pytest

from tessera.train.rewards import library


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("42", "42", 1),
        (" 42\n", "42", 1),
        ("so 40 + 2.\n#### 42", "20 + 22 = 42\n#### 42", 1),
        ("#### 41\n#### 42\nfrom 41", "#### 42", 1),
        ("42.0", "42", 1),
        ("1,000", "1000.", 1),
        ("10,00", "1000", 0),
        ("1e3", 1000, 1),
        (".5", 0.5, 1),
        ("-7", "7", 0),
        ("0.1", "0.10000000000000001", 0),
        ("4٢", "42", 0),
        ("NaN", "nan", 0),
        (".", ".0", 0),
        ("1e999999999", "1", 0),
        ("42\0", "42", 0),
        ("1" * 10**6 + "x", "42", 0),
        ("Paris", "paris", 0),
        ("", "42", 0),
        ("42", "", None),
        ("42", None, None),
        ("42", float("nan"), None),
    ],
    ids=lambda value: str(value)[:12],
)
def test_exact(completion, answer, reward):
    score = library.exact()
    assert score([completion], answer=[answer], other=[1]) == [reward]
    assert score([said(completion)], answer=[answer]) == [reward]


def test_exact_reads_another_column_and_refuses_what_is_no_answer():
    assert library.exact(column="gold")(["a"], gold=["a"], answer=["b"]) == [1]
    with pytest.raises(TypeError, match="not list"):
        library.exact()(["a"], answer=[["a"]])
    with pytest.raises(TypeError, match="not bool"):
        library.exact()(["True"], answer=[True])


@pytest.mark.slow(reason="it imports SymPy")
@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"It is $\frac12$.", "0.5", 1),
        (r"\boxed{2\sqrt3}", r"2\sqrt{3}", 1),
        (r"\boxed{2}", r"2\sqrt{3}", 0),
        (r"\boxed{3}", "x + 3", 0),
        (r"\boxed{1+x^2}", "x^2+1", 1),
        (r"\boxed{1024}", "#### 1,024", 1),
        ("no number", "3", 0),
        ("3", r"\boxed{", None),
        ("3", None, None),
    ],
)
def test_math(completion, answer, reward):
    pytest.importorskip("math_verify")
    assert library.math()([completion], answer=[answer]) == [reward]


def test_regex_is_that_of_python():
    score = library.regex(pattern="^<answer>.*</answer>$")
    texts = ["<answer>1</answer>", "<answer>\n</answer>", "x<answer>1</answer>"]
    assert score(texts) == [1, 0, 0]
    assert library.regex(pattern="(?s)^<a>.*</a>$")(["<a>\n</a>"]) == [1]
    assert score([[], said("<answer></answer>")]) == [0, 1]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ('{"a": 1}', 1),
        (' {"a": 1}\n', 1),
        ('{"a": "1"}', 0),
        ('```json\n{"a": 1}\n```', 0),
        ("{}", 0),
        ('{"a": NaN}', 0),
        ("", 0),
        ("[" * 100_000, 0),
        ('{"a": ' + "1" * 5000 + "}", 0),
    ],
    ids=lambda value: str(value)[:20],
)
def test_json_schema(completion, reward):
    pytest.importorskip("jsonschema")
    schema = {"required": ["a"], "properties": {"a": {"type": "integer"}}}
    assert library.json_schema(schema=schema)([completion]) == [reward]
    score = library.json_schema(column="schema")
    assert score([completion, "1"], schema=[schema, None]) == [reward, None]


def test_json_schema_refuses_what_is_no_schema_and_opens_no_address():
    jsonschema = pytest.importorskip("jsonschema")
    with pytest.raises(ValueError, match="one of them"):
        library.json_schema()
    with pytest.raises(jsonschema.SchemaError):
        library.json_schema(schema={"type": "no type"})
    remote = {"$ref": "http://localhost:9/schema.json"}
    with pytest.raises(Exception, match=r"Unresolvable|localhost"):
        library.json_schema(schema=remote)(["1"])


def test_length_is_equation_13_of_dapo():
    score = library.length(maximum=100, cache=20, minimum=2)
    sizes = [1, 2, 80, 81, 90, 100, 101]
    expected = [-1, 0, 0, -0.05, -0.5, -1, -1]
    assert score([[7] * size for size in sizes]) == expected
    score = library.length(maximum=3, unit="characters")
    assert score(["", "abc", "abcd", said("ééé")]) == [0, 0, -1, 0]
