"""Code blocks of Markdown, and the program in an answer."""

import re

import pytest

from forethought.answers.code_blocks import code_blocks, program_in

DEFINITION = re.compile(r"^def f\b", re.MULTILINE)


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("```python\nx\n```", [("x\n", "python")]),
        ("```\nx\n", [("x\n", "")]),
        ("```py title='a b' {1,2}\nx\n```", [("x\n", "py title='a b' {1,2}")]),
        ("``` c++ 17\nx\n```  ", [("x\n", "c++ 17")]),
        ("````\n```\nx\n```\n````", [("```\nx\n```\n", "")]),
        ("````\nx\n```\n`````", [("x\n```\n", "")]),
        ("~~~\n```\nx\n~~~", [("```\nx\n", "")]),
        ("~~~ `a`\nx\n~~~~", [("x\n", "`a`")]),
        ("``` a`b\nx\n```", [("", "")]),
        ("``\nx\n``", []),
        ("   ```\n   x\n     y\n  ```", [("x\n  y\n", "")]),
        ("    ```\n    x", [("```\nx\n", None)]),
        ("text\n\n    x\n\n      y\n\nend", [("x\n\n  y\n", None)]),
        ("text\n    x", []),
        ("\tx\n", [("x\n", None)]),
        ("- a\n\n  ```\n  x\n  ```\n- b", [("x\n", "")]),
        ("1. ```py\n   x\n       y\n   ```", [("x\n    y\n", "py")]),
        ("- a\n\n      x", [("x\n", None)]),
        ("> ```\n> x\n>   y\n> ```\n> z", [("x\n  y\n", "")]),
        ("> ```\n> x\n\nz", [("x\n", "")]),
        ("> 1. ~~~\n>    x\n>    ~~~", [("x\n", "")]),
        ("- ```\n  x\nz", [("x\n", "")]),
        ("```\r\nx\r\n```", [("x\n", "")]),
        ("a\n===\n    x", [("x\n", None)]),
        ("```\nx = '\u2028\x85\x0c\x1e'\n```", [("x = '\u2028\x85\x0c\x1e'\n", "")]),
        ("```\rx\ry\r```\r", [("x\ny\n", "")]),
        ("```\nx\n```\u00a0\n```", [("x\n```\u00a0\n", "")]),
        ("```\n\tx\n```", [("\tx\n", "")]),
        ("", []),
    ],
)
def test_code_blocks_are_those_of_commonmark(text, blocks):
    found = [(block.code, block.info if block.is_fenced else None) for block in code_blocks(text)]
    assert found == blocks


@pytest.mark.parametrize(
    ("text", "code", "is_block"),
    [
        ("```python\nx = 1\n```\nDone.", "x = 1\n", True),
        ("```\nx = 1\n```\n~~~\ny = 2\n~~~", "y = 2\n", True),
        ("```\ndef f(): 1\n```\nUse it:\n```\nf()\n```", "def f(): 1\n", True),
        ("Run this:\n```python\nx = 1", "x = 1\n", True),
        ("Here:\n\n    x = 1\n    y = 2\n\nDone.", "x = 1\ny = 2\n", True),
        ("def f():\n    x = 1\n\n    return x\n", "def f():\n    x = 1\n\n    return x\n", False),
        ("for i in a:\n    x\n\n    y\n", "for i in a:\n    x\n\n    y\n", False),
        ("    return 1\n\n    # end\n", "    return 1\n\n    # end\n", False),
        ("<think>```\nbad\n```</think>```\nx = 1\n```", "x = 1\n", True),
        ("- in a list:\n  ```\ndef f():\n    return 1\n  ```", "def f():\n    return 1\n", True),
        ("I cannot say.", "I cannot say.", False),
    ],
)
def test_the_program_of_an_answer(text, code, is_block):
    assert program_in(text, DEFINITION) == (code, is_block)


@pytest.mark.parametrize("text", ["", " \n", "<think>x = 1</think>\n"])
def test_a_blank_answer_has_no_program(text):
    assert program_in(text) is None


@pytest.mark.parametrize(
    "line", ["```\n", "> ", "- ", "    x\n", "~~~~ a\n", "`", "1. a\n", "(" * 9]
)
@pytest.mark.timeout(60)
def test_no_text_takes_long(line):
    program_in(line * 20_000)
