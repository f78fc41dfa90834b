"""Signs that the decoder has lost the audio."""

from streaming.guards import gives_up, is_looping, is_too_fast, repeated_tail, without_loop
from streaming.transcript import Quality, Word
from vad.audio import SAMPLE_RATE_HZ, SpeechSpan


def words_of(text: str) -> tuple[Word, ...]:
    return tuple(Word(f" {word}", None, None, None) for word in text.split())


def span_of(duration_s: float) -> SpeechSpan:
    return SpeechSpan(0, int(duration_s * SAMPLE_RATE_HZ))


def test_more_text_than_anyone_can_say_is_a_loop() -> None:
    loop = words_of("one two three " * 30)
    assert is_too_fast(loop, span_of(4))
    assert is_looping(loop, span_of(4), compression_ratio=None)


def test_a_fast_talker_is_not_a_loop() -> None:
    fast = words_of(
        "and so I said to him that we would never ever get there before the others did"
    )  # 5.7 words a second
    assert not is_too_fast(fast, span_of(3))


def test_one_word_in_a_short_window_is_not_too_fast() -> None:
    assert not is_too_fast(words_of("incomprehensible"), span_of(0.3))


def test_a_phrase_truly_said_three_times_survives() -> None:
    thrice = words_of("location location location")
    assert not is_looping(thrice, span_of(2.5), compression_ratio=1.6)


def test_many_slow_repeats_survive_unless_the_text_compresses_like_a_loop() -> None:
    slow = words_of("no " * 8)
    assert not is_looping(slow, span_of(8), compression_ratio=2.0)
    assert is_looping(slow, span_of(8), compression_ratio=2.6)


def test_longest_run_is_found_whatever_its_phrase() -> None:
    assert repeated_tail(words_of("so we go on and on and on and on")) == (2, 3)
    assert repeated_tail(words_of("a b c")) == (0, 1)
    assert repeated_tail(()) == (0, 1)


def test_a_loop_is_cut_to_one_round() -> None:
    assert without_loop(words_of("it was the it was the it was the")) == words_of("it was the")
    assert without_loop(words_of("nothing repeats here")) == words_of("nothing repeats here")


def test_an_empty_answer_that_is_in_doubt_gives_up() -> None:
    sure, unsure = Quality(-0.1, 0.0, 0.0, 0.0), Quality(-0.6, 0.0, 0.0, 0.0)
    assert gives_up((), unsure) and not gives_up((), sure)
    assert not gives_up(words_of("again"), unsure)
    assert not gives_up((), None) and not gives_up((), Quality(None, None, None, None))
