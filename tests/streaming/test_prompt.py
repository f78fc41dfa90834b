"""What the next decode is told."""

from streaming.prompt import MAX_PROMPT_CHARACTERS, is_confident, prompt_from
from streaming.transcript import Quality


def quality(mean_logprob: float | None, temperature: float | None = 0.0) -> Quality:
    return Quality(mean_logprob, 0.0, 1.5, temperature)


def test_only_confident_text_is_carried_over() -> None:
    assert is_confident(quality(-0.2))
    assert not is_confident(quality(-0.9))
    assert not is_confident(quality(-0.2, temperature=0.4))


def test_an_engine_that_states_no_quality_is_not_prompted() -> None:
    assert not is_confident(None)
    assert not is_confident(quality(None))


def test_a_long_text_is_cut_at_a_word() -> None:
    text = "word " * 100 + "end"
    prompt = prompt_from(text)
    assert len(prompt) <= MAX_PROMPT_CHARACTERS and text.endswith(" " + prompt) and prompt.startswith("word")


def test_a_script_without_spaces_is_cut_between_characters() -> None:
    assert prompt_from("字" * 300) == "字" * MAX_PROMPT_CHARACTERS
