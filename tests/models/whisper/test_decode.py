"""Each logit rule by itself, greedy decoding with any draft, sampling that repeats, and quality control."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.whisper import decode as module
from models.whisper.config import SpecialTokens, WhisperConfig
from models.whisper.decode import Decoded, Request, Rules, decode, mask_logits
from models.whisper.reference import Whisper

# A vocabulary of 40: text 0..19, end 20, start 21, two languages, tasks, markers, timestamps 30..39.
SPECIAL = SpecialTokens(20, 21, (22, 23), 24, 25, 26, 27, 28, 29, 30)
SPACE, TEXT, LATER = 5, 6, 7
CONFIG = WhisperConfig(8, 40, 64, 1, 128, 1, 2, 20, 64, ((0, 0), (1, 0)))
TIMED, UNTIMED = (
    Rules.of(SPECIAL, 40, non_speech=(3, 4), space=SPACE, with_timestamps=timed) for timed in (True, False)
)
END, T0 = SPECIAL.end_of_text, SPECIAL.timestamp_begin


def allowed(written: Sequence[int], rules: Rules, logits: torch.Tensor | None = None) -> set[int]:
    """Tokens left by the rules; text is much likelier than timestamps unless ``logits`` are given."""
    if logits is None:
        logits = torch.zeros(40)
        logits[:T0] = 20.0
    masked = mask_logits(logits, written, rules)
    return {token for token in range(40) if masked[token] > -math.inf}


def test_symbols_languages_and_tasks_are_never_written() -> None:
    assert allowed([TEXT], UNTIMED) == set(range(END + 1)) - {3, 4}


def test_without_timestamps_none_is_written() -> None:
    assert max(allowed([TEXT], UNTIMED)) < T0


def test_the_first_token_is_neither_space_nor_the_end() -> None:
    assert allowed([], UNTIMED) & {SPACE, END} == set()
    assert allowed([TEXT], UNTIMED) >= {SPACE, END}


def test_the_first_token_is_an_early_timestamp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_INITIAL_TIMESTAMP_INDEX", 3)
    assert allowed([], TIMED) == {T0, T0 + 1, T0 + 2, T0 + 3}


def test_text_follows_an_opening_timestamp() -> None:
    assert max(allowed([T0], TIMED)) < T0
    assert max(allowed([T0, TEXT, T0 + 2, T0 + 3], TIMED)) < T0


def test_a_timestamp_that_closes_a_segment_is_followed_by_its_equal_a_later_one_or_the_end() -> None:
    logits = torch.zeros(40)
    logits[T0:] = -20.0
    after_close = allowed([T0, TEXT, T0 + 4], TIMED, logits)
    assert after_close == {token for token in range(40) if END <= token < T0 or token >= T0 + 4} - set(
        range(SPECIAL.start_of_transcript, T0)
    )


def test_timestamps_rise_within_a_segment() -> None:
    assert {token for token in allowed([T0 + 2, TEXT], TIMED) if token >= T0} == set(range(T0 + 3, 40))


def test_timestamps_win_when_together_they_outweigh_the_best_text() -> None:
    logits = torch.full((40,), -10.0)
    logits[TEXT] = 0.0
    logits[T0 + 1 :] = -1.0  # nine of them: log 9 - 1 > 0
    assert min(allowed([T0, TEXT], TIMED, logits)) > T0


@pytest.fixture(scope="module")
def window() -> tuple[Whisper, torch.Tensor]:
    """A small random model, its logits spread wide enough to write various tokens, and one window's audio states."""
    torch.manual_seed(3)
    model = Whisper(CONFIG).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.25)
    with torch.inference_mode():
        return model, model.encoder(torch.randn(1, 8, 40))


@torch.inference_mode()
def run(
    window,
    rules: Rules,
    *,
    draft: Sequence[int] = (),
    prefix: Sequence[int] = (),
    temperature: float = 0.0,
    n_frames: int | None = None,
) -> Decoded:
    model, audio = window
    request = Request((27, 8, 9, 21, 22, 25), 3, tuple(prefix), tuple(draft), max_tokens=20, n_frames=n_frames)
    return decode(model, model.decoder.open_cache(audio), request, rules, temperature=temperature)


def assert_same(one: Decoded, other: Decoded) -> None:
    assert one.tokens == other.tokens
    assert one.has_ended == other.has_ended
    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert one.mean_logprob == pytest.approx(other.mean_logprob, abs=1e-4)
    assert one.no_speech_probability == pytest.approx(other.no_speech_probability, abs=1e-5)
    torch.testing.assert_close(one.attention, other.attention, atol=1e-4, rtol=1e-4)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from([TIMED, UNTIMED]), st.lists(st.integers(0, 19), max_size=3))
def test_any_draft_gives_what_greedy_decoding_gives(window, data, rules, prefix) -> None:
    greedy = run(window, rules, prefix=prefix)
    whole = [*greedy.tokens, END]
    cut, skip = data.draw(st.integers(0, len(whole))), data.draw(st.integers(0, 4))
    draft = whole[:cut] + data.draw(st.lists(st.integers(0, 39), max_size=4)) + whole[cut + skip :]
    assert_same(run(window, rules, prefix=prefix, draft=draft), greedy)


def test_the_right_draft_is_verified_whole_and_a_replaced_token_costs_only_itself(window) -> None:
    greedy = run(window, UNTIMED)
    assert len(greedy.tokens) > 10
    right = run(window, UNTIMED, draft=greedy.tokens)
    assert right.n_verified >= len(greedy.tokens) - 1
    assert (right.n_steps, greedy.n_steps) == (1, len(greedy.tokens) + greedy.has_ended)
    near = [greedy.tokens[max(i - 3, 0) : i] + greedy.tokens[i + 1 : i + 4] for i in range(len(greedy.tokens))]
    at = next(i for i, token in enumerate(greedy.tokens) if token not in near[i])
    wrong = [*greedy.tokens[:at], (greedy.tokens[at] + 1) % 20, *greedy.tokens[at + 1 :]]
    assert run(window, UNTIMED, draft=wrong).n_verified >= len(greedy.tokens) - 3


def test_attention_has_a_row_for_each_token_and_one_for_what_follows(window) -> None:
    decoded = run(window, UNTIMED, prefix=[TEXT, LATER])
    assert decoded.attention.shape == (2 + len(decoded.tokens) + decoded.has_ended, 20)


def test_attention_is_kept_of_the_audios_own_frames(window) -> None:
    decoded, whole = run(window, UNTIMED, n_frames=7), run(window, UNTIMED)
    assert decoded.tokens == whole.tokens
    assert decoded.attention.shape == (len(whole.attention), 7)


def test_sampling_gives_the_same_tokens_each_time_and_others_than_greedy(window) -> None:
    first = run(window, UNTIMED, temperature=1.0)
    assert_same(first, run(window, UNTIMED, temperature=1.0))
    assert first.tokens != run(window, UNTIMED).tokens


def test_decoding_stops_where_the_decoder_has_no_more_positions(window) -> None:
    decoded = run(window, UNTIMED, prefix=[TEXT] * (CONFIG.n_text_positions - 6 - 5))
    assert len(decoded.tokens) <= 5


def test_languages_are_scored_by_their_tokens_alone(window) -> None:
    model, audio = window
    with torch.inference_mode():
        probabilities = module.language_probabilities(model, model.decoder.open_cache(audio), SPECIAL)
    assert probabilities.shape == (2,)
    assert float(probabilities.sum()) == pytest.approx(1.0)


def outcome(
    *,
    mean_logprob: float,
    no_speech: float = 0.0,
    has_ended: bool = True,
    temperature: float = 0.0,
    token_logprob: float = 0.0,
) -> Decoded:
    return Decoded((TEXT,), (token_logprob,), mean_logprob, no_speech, temperature, has_ended, torch.zeros(2, 2), 0, 1)


@pytest.mark.parametrize(
    ("decoded", "text", "accepted"),
    [
        (outcome(mean_logprob=-0.3), "a fine day", True),
        (outcome(mean_logprob=-0.3), "again and again " * 12, False),
        (outcome(mean_logprob=-0.3, has_ended=False), "a fine day", False),
        (outcome(mean_logprob=-1.2), "a fine day", False),
        (outcome(mean_logprob=-1.2, no_speech=0.9), "a fine day", True),
    ],
)
def test_repeats_cut_texts_and_guesses_are_tried_again_but_silence_is_not(decoded, text, accepted) -> None:
    assert module.is_acceptable(decoded, text) is accepted


def fall_back(decode_at: Callable[[float], Decoded], text: str) -> Decoded:
    """``with_fallback`` for one window."""
    (decoded,) = module.with_fallback([decode_at(0.0)], lambda indices, t: [decode_at(t)], lambda tokens: text)
    return decoded


def test_temperatures_rise_until_a_decoding_is_acceptable() -> None:
    tried = []

    def decode_at(temperature: float) -> Decoded:
        tried.append(temperature)
        return outcome(mean_logprob=-2.0 + temperature * 3, temperature=temperature)

    assert fall_back(decode_at, "text").temperature == 0.4
    assert tried == [0.0, 0.2, 0.4]


def test_of_decodings_that_are_never_acceptable_the_likeliest_is_kept() -> None:
    logprobs = dict(zip(module.TEMPERATURES, (-1.9, -1.2, -1.4, -3.0, -5.0, -6.8), strict=True))
    decoded = fall_back(lambda t: outcome(mean_logprob=logprobs[t], temperature=t), "text")
    assert decoded.temperature == 0.2


def test_a_repetition_is_kept_only_if_every_temperature_repeats() -> None:
    def decode_at(temperature: float) -> Decoded:
        return outcome(mean_logprob=-1.5 - temperature, temperature=temperature, has_ended=temperature >= 0.8)

    assert fall_back(decode_at, "text").temperature == 0.8
    assert fall_back(decode_at, "again and again " * 12).temperature == 0.0


def test_windows_fall_back_together_but_each_only_as_far_as_it_must() -> None:
    asked = []

    def again(indices: Sequence[int], temperature: float) -> list[Decoded]:
        asked.append((temperature, tuple(indices)))
        return [outcome(mean_logprob=-1.5 + index * temperature, temperature=temperature) for index in indices]

    first = [outcome(mean_logprob=logprob) for logprob in (-1.5, -0.5, -1.5, -1.5)]
    kept = module.with_fallback(first, again, lambda tokens: "text")
    assert [one.temperature for one in kept] == [0.0, 0.0, 0.4, 0.2]
    assert asked == [(0.2, (0, 2, 3)), (0.4, (0, 2)), (0.6, (0,)), (0.8, (0,)), (1.0, (0,))]


@pytest.mark.parametrize(
    ("decoded", "silent"),
    [
        (outcome(mean_logprob=-1.2, no_speech=0.7, token_logprob=-0.1), True),
        (outcome(mean_logprob=-0.5, no_speech=0.81, token_logprob=math.log(0.43)), True),  # "you", of music
        (outcome(mean_logprob=-0.1, no_speech=0.81, token_logprob=math.log(0.9)), False),
        (outcome(mean_logprob=-2.0, no_speech=0.5, token_logprob=-2.0), False),
    ],
)
def test_a_text_less_likely_than_no_speech_is_silence(decoded, silent) -> None:
    assert module.is_silent(decoded) is silent


def test_the_token_limit_grows_with_the_audio_up_to_the_decoders_half() -> None:
    assert module.max_sampled_tokens(0) > 0
    assert module.max_sampled_tokens(16_000) > module.max_sampled_tokens(8_000)
    assert module.max_sampled_tokens(480_000) == module.MAX_SAMPLED_TOKENS


@pytest.mark.parametrize(
    ("tokens", "segments", "resume"),
    [
        # Two whole segments, the text ended by one timestamp: the window is used up.
        ([30, TEXT, 33, 33, LATER, 36], [(1, 2, 0, 3), (4, 5, 3, 6)], None),
        # The last text is not whole: the next window begins at the last closed segment.
        ([30, TEXT, 33, 33, LATER], [(1, 2, 0, 3)], 3),
        # The speaker paused between segments; the pair ends the text: nothing whole follows.
        ([31, TEXT, 33, 35], [(1, 2, 1, 3)], 3),
        # No pair: one segment, open or closed.
        ([30, TEXT, LATER], [(1, 3, 0, None)], None),
        ([30, TEXT, LATER, 34], [(1, 3, 0, 4)], None),
        ([], [], None),
    ],
)
def test_segments_are_cut_at_pairs_of_timestamps(tokens, segments, resume) -> None:
    found, resume_position = module.split_at_timestamps(tokens, T0)
    assert [(part.begin, part.end, part.start_position, part.end_position) for part in found] == segments
    assert resume_position == resume


def test_a_text_of_several_words_is_not_silence_for_being_as_unlikely_as_no_speech() -> None:
    logprob, n_tokens = math.log(0.55), 8  # spoken digits, base: 0.55 a token against 0.76 for no speech
    digits = replace(
        outcome(mean_logprob=n_tokens * logprob / (n_tokens + 1), no_speech=0.76),
        tokens=(TEXT,) * n_tokens,
        logprobs=(logprob,) * n_tokens,
    )
    assert not module.is_silent(digits)
