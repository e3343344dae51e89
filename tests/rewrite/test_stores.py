"""Stores into a part of a tensor behind a text become values of the whole, where they are that and nothing else."""

from __future__ import annotations

import ast

import pytest

from diffkern.rewrite.stores import name_starts, without_store

STARTS = "x[:, text.shape[1]:] = rotate(x[:, text.shape[1]:], table)"


@pytest.mark.parametrize(
    ("statement", "value"),
    [
        ("x[:, n:] = rotate(x[:, n:], table)", "x = torch.cat([x[:, :n], rotate(x[:, n:], table)], dim=1)"),
        ("x[:, :, n:] = rotate(x[:, :, n:])", "x = torch.cat([x[:, :, :n], rotate(x[:, :, n:])], dim=2)"),
        ("x[n:] = rotate(x[n:])", "x = torch.cat([x[:n], rotate(x[n:])], dim=0)"),
    ],
)
def test_a_store_is_a_join_of_what_stays_and_what_is_computed(statement: str, value: str) -> None:
    assert ast.unparse(without_store(ast.parse(statement).body[0])) == value


STAYS = {
    "two targets": "x[:, n:] = y = rotate(x[:, n:])",
    "no part": "x = rotate(x)",
    "an attribute": "self.x[:, n:] = rotate(self.x[:, n:])",
    "no call": "x[:, n:] = x[:, n:]",
    "no argument": "x[:, n:] = rotate()",
    "of another": "x[:, n:] = rotate(y[:, n:])",
    "an index": "x[n:, 0] = rotate(x[n:, 0])",
    "a step": "x[:, n::2] = rotate(x[:, n::2])",
    "an end": "x[:, n:m] = rotate(x[:, n:m])",
    "no start": "x[:] = rotate(x[:])",
    "two starts": "x[m:, n:] = rotate(x[m:, n:])",
    "a sum": "x[:, n + 1:] = rotate(x[:, n + 1:])",
}


@pytest.mark.parametrize("name", STAYS)
def test_any_other_statement_stays(name: str) -> None:
    statement = ast.parse(STAYS[name]).body[0]
    assert without_store(statement) is statement


def _named(body: str) -> str:
    tree = ast.parse(f"def call(x, y, text):\n{body}").body[0]
    assert isinstance(tree, ast.FunctionDef)
    name_starts(tree)
    return "\n".join(ast.unparse(statement) for statement in tree.body)


def test_the_length_of_a_text_has_one_name_for_stores_one_after_the_other() -> None:
    assert _named(f" {STARTS}\n {STARTS.replace('x[', 'y[')}\n text = y\n {STARTS}") == "\n".join(
        [
            "_s2_start = text.shape[1]",
            "x[:, _s2_start:] = rotate(x[:, _s2_start:], table)",
            "y[:, _s2_start:] = rotate(y[:, _s2_start:], table)",
            "text = y",
            "_s5_start = text.shape[1]",
            "x[:, _s5_start:] = rotate(x[:, _s5_start:], table)",
        ]
    )
    assert "_s3_start = text.shape[1]" in _named(f" if text is not None:\n  {STARTS}")


NOT_NAMED = {
    "two targets": " x[:, text.shape[1]:] = y = rotate(x)",
    "an attribute": " self.x[:, text.shape[1]:] = rotate(x)",
    "its own length": " x[:, x.shape[1]:] = rotate(x)",
    "of an attribute": " x[:, self.text.shape[1]:] = rotate(x)",
    "no shape": " x[:, text.stride[1]:] = rotate(x)",
    "a dimension that varies": " x[:, text.shape[dim]:] = rotate(x)",
    "two starts": " x[text.shape[0]:, text.shape[1]:] = rotate(x)",
    "a nested function": f" def inner():\n  {STARTS}",
}


@pytest.mark.parametrize("name", NOT_NAMED)
def test_any_other_start_stays(name: str) -> None:
    assert "_start" not in _named(NOT_NAMED[name])
