"""Words join to text."""

from streaming.transcript import Word, text_of


def test_words_join_in_scripts_with_and_without_spaces() -> None:
    assert text_of((Word(" It", None, None, None), Word(" was,", None, None, None))) == "It was,"
    assert text_of((Word("你", None, None, None), Word("好", None, None, None))) == "你好"
    assert text_of(()) == ""
