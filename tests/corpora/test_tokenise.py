"""From text to tokens."""

import pytest

from gradflow.corpora import tokenise


def test_words_are_split_from_punctuation():
    text = "Don't stop, “he” said:\n\n it's 3 o'clock!<|endoftext|>\nÉté_2 x"
    assert tokenise(text) == [
        *("Don't", "stop", ",", "“", "he", "”", "said", ":", "it's", "3"),
        *("o'clock", "!", "<|endoftext|>", "Été_2", "x"),
    ]


def test_white_space_lines_and_a_function_of_ones_own():
    text = " = A title = \n \nthe @-@ end .\n"
    assert tokenise(text, "whitespace") == text.split()
    marked = tokenise(text, "whitespace", line_end="<eos>")
    expected = "= A title = <eos> <eos> the @-@ end . <eos>"
    assert marked == expected.split()
    assert tokenise(text.rstrip("\n"), "whitespace", line_end="<eos>") == marked
    assert tokenise("abc", list) == ["a", "b", "c"]
    assert tokenise("a-b\nc", lambda t: t.split("-"), line_end="|") == list("ab|c|")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("",), "`text` must contain more than white space, got 0 characters"),
        ((" \n\t",), "than white space, got 3 characters"),
        ((b"bytes",), "`text` must be a string, got bytes"),
        (("a", "letters"), "`by` must be 'words', 'whitespace' or a function"),
        (("a", lambda t: [1]), "`by` must return tokens as strings, got 1"),
        (("a", lambda t: []), "`by` must return tokens as strings, got none"),
        (("a", str.lower), "`by` must return a list of tokens, got 'a'"),
    ],
)
def test_refused_texts(arguments, message):
    with pytest.raises(ValueError, match=message):
        tokenise(*arguments)
    with pytest.raises(ValueError, match="`line_end` must be a token or None, got ''"):
        tokenise("a", line_end="")
