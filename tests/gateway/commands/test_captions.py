"""What a person or a program sees of a session's events."""

import io
import json

import pytest

from gateway.client_events import ErrorEvent, Final, Partial, SpeechStarted, Word
from gateway.commands.captions import Captions, JsonLines, clock, partial_line


def words(text: str) -> tuple[Word, ...]:
    return tuple(Word(f" {word}", None, None, None) for word in text.split())


def partial(text: str, *, n_committed: int = 0) -> Partial:
    return Partial(1, 1, 1, text, 0.0, 1.0, words(text), n_committed, "en")


def final(text: str) -> Final:
    return Final(2, 1, 2, text, 0.0, 61.26, words(text), len(text.split()), "en", "silence")


def test_a_terminal_shows_settled_words_plain_and_others_dim() -> None:
    assert partial_line(partial("ever tried again", n_committed=2), 80) == "ever tried\x1b[2m again\x1b[0m"


def test_a_partial_never_wraps_and_keeps_its_end() -> None:
    assert partial_line(partial("ever tried again", n_committed=1), 11) == "\x1b[2mried again\x1b[0m"
    assert partial_line(partial("ever tried again", n_committed=3), 13) == "r tried again\x1b[2m\x1b[0m"[1:]


def test_wide_characters_take_two_columns() -> None:
    wide = Partial(1, 1, 1, "", 0.0, 1.0, (Word("最良の時代", None, None, None),), 0, "ja")
    assert partial_line(wide, 8) == "\x1b[2mの時代\x1b[0m"


def test_a_final_replaces_the_partial_on_a_terminal() -> None:
    out = io.StringIO()
    captions = Captions(out, is_terminal=True, columns=80)
    captions.show(partial("ever"), sent_s=1.0)
    captions.show(final("Ever tried."), sent_s=1.0)
    assert out.getvalue() == "\r\x1b[2K\x1b[2mever\x1b[0m\r\x1b[2K[00:00.0 – 01:01.3] Ever tried.\n"


def test_a_file_gets_finals_only_and_no_control_characters() -> None:
    out = io.StringIO()
    captions = Captions(out, is_terminal=False, columns=80)
    for event in (SpeechStarted(1, 0.0, 0.3), partial("ever"), final("Ever tried."), final("")):
        captions.show(event, sent_s=1.0)
    captions.close()
    assert out.getvalue() == "[00:00.0 – 01:01.3] Ever tried.\n"


def test_a_file_gets_changed_partials_if_asked_for() -> None:
    out = io.StringIO()
    captions = Captions(out, is_terminal=False, columns=80, with_partials=True)
    for text in ("ever", "ever", "ever tried"):
        captions.show(partial(text), sent_s=1.0)
    assert out.getvalue() == "  … ever\n  … ever tried\n"


def test_errors_are_told_beside_the_captions(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    Captions(out, is_terminal=False, columns=80).show(
        ErrorEvent(1, "decode_failed", "it broke", False, None), sent_s=1.0
    )
    assert out.getvalue() == ""
    assert capsys.readouterr().err == "error: decode_failed: it broke\n"


def test_json_lines_say_how_much_was_sent_and_when_the_event_came() -> None:
    out = io.StringIO()
    clock_s = iter([100.0, 102.5])
    JsonLines(out, now_s=lambda: next(clock_s)).show(final("Ünder"), sent_s=1.23456)
    line = json.loads(out.getvalue())
    assert (line["type"], line["text"], line["sent_s"], line["received_s"]) == ("final", "Ünder", 1.235, 2.5)
    assert line["words"] == [{"text": " Ünder", "start_s": None, "end_s": None, "confidence": None}]
    assert "Ünder" in out.getvalue()


def test_the_clock_has_tenths() -> None:
    assert [clock(0.04), clock(59.96), clock(3_600.0)] == ["00:00.0", "01:00.0", "60:00.0"]
