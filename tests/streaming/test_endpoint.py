"""When words read as a finished sentence."""

import pytest

from streaming.endpoint import reads_complete
from streaming.transcript import Word


def words(text: str) -> list[Word]:
    return [Word(f" {word}", None, None, None) for word in text.split()]


@pytest.mark.parametrize(
    "text", ["It was.", "Was it?", "Stop!", 'He said: "It was."', "(So it was.)", "そうです。", "क्या हुआ?", "यह था।"]
)
def test_a_mark_that_ends_a_sentence_makes_it_complete(text: str) -> None:
    assert reads_complete(words(text))


@pytest.mark.parametrize("text", ["", "It was", "It was,", "It was...", "It was…", "Well -", '"', "3.5", "one; two:"])
def test_anything_else_may_go_on(text: str) -> None:
    assert not reads_complete(words(text))
