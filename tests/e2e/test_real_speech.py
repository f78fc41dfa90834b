"""What a client sees of real speech, with the real model and the real detector, on a virtual clock.

The clock runs as fast as the decodes allow, so that a minute of silence costs nothing. Recordings come with the models'
wheels; those of other sounds than speech are heard where they lie beside the checkout (``../shared/audio``).
"""

import io
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import jiwer
import numpy as np
import pytest
import soundfile
import soxr
from numpy.typing import NDArray

from gateway import messages as m
from gateway.config import SessionConfig
from gateway.session import ServedModel, Session
from gateway.simulation import Seen, Simulation
from models.store import BECKETT_TEXT, TWO_CITIES_TEXT
from streaming.engine import Chunk, DecodeOptions, SpeechEngine
from tests.fetched import clip, engine_of, read, recorded
from tests.words import error_rate, normalised
from vad.audio import SAMPLE_RATE_HZ, SpeechSpan
from vad.detector import SpeechDetector
from vad.gate import GateSettings
from vad.levels import TwoLevelDetector
from vad.silero import SileroDetector

pytestmark = [pytest.mark.weights, pytest.mark.e2e]

SHARED = Path(__file__).parents[3] / "shared" / "audio"
PACKET_SAMPLES = 800  # 50 ms
HANGOVER_MS = 400

Samples = NDArray[np.float32]  # [n_samples] at 16 kHz
_Message = TypeVar("_Message")


# ---------------------------------------------------------------- the parts


def engine() -> SpeechEngine:
    return engine_of("whisper-tiny.en")


@cache
def detector() -> SpeechDetector:
    return TwoLevelDetector(SileroDetector())


def hope() -> Samples:
    """It was the spring of hope, it was the winter of despair."""
    return clip("two_cities", 17.4, 20.9)


HOPE_TEXT = "It was the spring of hope, it was the winter of despair."
SPRING_S, WINTER_S = 0.63, 1.97  # where these words begin in it


def silence(duration_s: float) -> Samples:
    return np.zeros(int(duration_s * SAMPLE_RATE_HZ), np.float32)


@dataclass(frozen=True)
class Played:
    """All that came of one session."""

    seen: list[Seen]
    simulation: Simulation

    def of(self, kind: type[_Message]) -> list[_Message]:
        return [item.message for item in self.seen if isinstance(item.message, kind)]

    @property
    def finals(self) -> list[m.Final]:
        return [final for final in self.of(m.Final) if final.text]

    @property
    def text(self) -> str:
        return " ".join(final.text for final in self.finals)

    @property
    def words(self) -> list[m.WordItem]:
        return [word for final in self.finals for word in final.words]


def run(inputs: Iterator[tuple[float, m.ClientMessage]], *, partial_interval_ms: int = 2_000) -> Played:
    served = {"model": ServedModel(engine().card, m.EngineItem(engine().backend, engine().why))}
    session = Session(
        "real",
        served,
        detector().initial_state(),
        config=SessionConfig(partial_interval_ms=partial_interval_ms),
        gate=GateSettings(hangover_ms=HANGOVER_MS),
        now_s=0.0,
    )
    simulation = Simulation(session, engine(), detector())
    return Played(simulation.run(inputs), simulation)


def live(
    samples: Samples, *, last: Sequence[m.ClientMessage] = (m.Bye(),), packet_samples: int = PACKET_SAMPLES
) -> Iterator[tuple[float, m.ClientMessage]]:
    """``samples`` in real time, ``last`` right behind them."""
    yield 0.0, m.Hello(audio=m.AudioSpec("f32le", SAMPLE_RATE_HZ))
    for at in range(0, len(samples), packet_samples):
        packet = samples[at : at + packet_samples]
        yield (at + len(packet)) / SAMPLE_RATE_HZ, m.Audio(packet.astype("<f4").tobytes())
    for message in last:
        yield len(samples) / SAMPLE_RATE_HZ, message


def play(samples: Samples, *, partial_interval_ms: int = 2_000) -> Played:
    return run(live(samples), partial_interval_ms=partial_interval_ms)


def bare(word: str) -> str:
    return re.sub(r"\W", "", word).lower()


def assert_orderly(played: Played) -> None:
    """Settled words never change, revisions rise, times never run back."""
    settled: dict[int, list[str]] = {}
    for event in played.seen:
        if isinstance(event.message, m.Partial | m.Final):
            segment = event.message
            now = [word.text for word in segment.words[: segment.n_committed]]
            before = settled.get(segment.segment, [])
            assert now[: len(before)] == before, "a settled word changed"
            settled[segment.segment] = now
    for final in played.finals:
        assert final.n_committed == len(final.words)
    starts = [word.start_s for word in played.words if word.start_s is not None]
    assert len(starts) == len(played.words)
    assert all(before <= after for before, after in pairwise(starts))
    assert all(word.end_s is not None and word.end_s >= (word.start_s or 0.0) for word in played.words)
    assert all(before.end_s <= after.start_s for before, after in pairwise(played.finals))


# ---------------------------------------------------------------- the main job


def test_real_speech_comes_back_whole_in_order_and_settled() -> None:
    played = play(np.concatenate([recorded("two_cities"), silence(1.0)]), partial_interval_ms=1_500)
    assert error_rate(TWO_CITIES_TEXT, played.text) <= 0.10
    assert_orderly(played)
    compared = jiwer.process_words(normalised(TWO_CITIES_TEXT), normalised(played.text))
    assert compared.insertions == 0, "every word once"
    assert len(played.of(m.SpeechStarted)) == len(played.of(m.SpeechEnded))
    first_partial_s = next(item.at_s for item in played.seen if isinstance(item.message, m.Partial))
    assert first_partial_s <= played.of(m.SpeechStarted)[0].onset_s + 1.0


def test_short_sentences_with_pauses_come_back_whole() -> None:
    played = play(np.concatenate([recorded("beckett"), silence(1.0)]))
    assert error_rate(BECKETT_TEXT, played.text) <= 0.10
    assert_orderly(played)


@pytest.mark.parametrize(
    ("start_s", "end_s", "gap_s", "phrase"),
    [(17.4, 19.0, 0.2, "spring of hope"), (8.5, 10.6, 0.9, "epoch of belief"), (24.3, 26.4, 0.3, "direct to heaven")],
)
def test_a_phrase_that_is_truly_said_eight_times_is_written_eight_times(
    start_s: float, end_s: float, gap_s: float, phrase: str
) -> None:
    said = np.concatenate([clip("two_cities", start_s, end_s), silence(gap_s)] * 8 + [silence(1.0)])
    assert normalised(play(said, partial_interval_ms=5_000).text).count(phrase) == 8


# ---------------------------------------------------------------- text out of nothing


NOISE = np.random.default_rng(7).standard_normal(10 * SAMPLE_RATE_HZ).astype(np.float32)


def pink(white: Samples) -> Samples:
    """White noise with 3 dB less power each octave up."""
    spectrum = np.fft.rfft(white)
    shaped = np.fft.irfft(spectrum / np.sqrt(np.maximum(np.arange(len(spectrum)), 1)), len(white))
    return (0.1 * shaped / shaped.std()).astype(np.float32)


@pytest.mark.parametrize(
    "sound",
    [
        pytest.param(lambda: silence(120.0), id="two minutes of digital silence"),
        pytest.param(lambda: np.float32(0.1) * NOISE, id="white noise"),
        pytest.param(lambda: np.float32(0.001) * NOISE, id="faint white noise"),
        pytest.param(lambda: pink(NOISE), id="pink noise"),
        pytest.param(lambda: np.ones(10 * SAMPLE_RATE_HZ, np.float32), id="full-scale DC"),
        pytest.param(lambda: -np.ones(10 * SAMPLE_RATE_HZ, np.float32), id="negative full-scale DC"),
        pytest.param(
            lambda: np.sin(2 * np.pi * 440 * np.arange(10 * SAMPLE_RATE_HZ) / SAMPLE_RATE_HZ).astype(np.float32),
            id="a tone",
        ),
    ],
)
def test_what_is_not_speech_gives_no_text(sound: Callable[[], Samples]) -> None:
    played = play(sound())
    assert played.of(m.Partial) == [] and played.of(m.Final) == []
    assert isinstance(played.of(m.Farewell)[0], m.Farewell)


def not_speech() -> list[str]:
    manifest = SHARED / "manifest.jsonl"
    if not manifest.is_file():
        return []
    lines = map(json.loads, manifest.read_text(encoding="utf-8").splitlines())
    return [line["file"] for line in lines if line["kind"] == "nonspeech"]


@pytest.mark.skipif(not not_speech(), reason="no ../shared/audio beside the checkout")
def test_recordings_of_other_sounds_give_no_text() -> None:
    """Music, dishes, keyboards, ringing, and one piece of music in which the detector is sure to hear a voice."""
    texts = {file: play(np.concatenate([read(SHARED / file), silence(1.0)])).text for file in not_speech()}
    assert {file: text for file, text in texts.items() if text} == {}


def test_a_minute_of_silence_between_speech_adds_nothing() -> None:
    played = play(np.concatenate([hope(), silence(60.0), hope(), silence(1.0)]))
    assert error_rate(f"{HOPE_TEXT} {HOPE_TEXT}", played.text) == 0.0
    assert_orderly(played)
    decoded_s = [
        (decode.job.chunk.span.start_sample / SAMPLE_RATE_HZ, decode.job.chunk.span.end_sample / SAMPLE_RATE_HZ)
        for decode in played.simulation.decodes
    ]
    assert not any(5.0 < end_s < 63.0 or end_s - start_s > 6.0 for start_s, end_s in decoded_s)


# ---------------------------------------------------------------- first and last words


@pytest.mark.parametrize("gap_ms", [0, 40, 100, 200])
@pytest.mark.parametrize("last", [m.Flush("f"), m.Bye()], ids=["flush", "bye"])
def test_the_last_word_just_before_the_end_is_heard(last: m.ClientMessage, gap_ms: int) -> None:
    speech = np.concatenate([hope()[: int(3.1 * SAMPLE_RATE_HZ)], silence(gap_ms / 1000)])  # to the last of "despair"
    messages = [last] if isinstance(last, m.Bye) else [last, m.Bye()]
    played = run(live(speech, last=messages))
    assert bare(played.words[-1].text) == "despair"
    kinds = [type(item.message) for item in played.seen]
    assert kinds.index(m.Final) < kinds.index(m.Flushed if last == m.Flush("f") else m.Farewell)


def test_a_flush_between_words_loses_and_doubles_none() -> None:
    """The session goes on behind it, and hears the rest of the sentence."""
    for flush_s in (1.62, 2.0):  # behind "hope", and inside "it was"
        at = int(flush_s * SAMPLE_RATE_HZ)
        head, rest = live(hope()[:at], last=[m.Flush("f")]), live(np.concatenate([hope()[at:], silence(1.0)]))
        next(rest)  # its hello
        played = run(itertools.chain(head, ((flush_s + at_s, message) for at_s, message in rest)))
        assert error_rate(HOPE_TEXT, played.text) <= 0.2
        texts = [bare(word.text) for word in played.words]
        assert "hope" in texts and texts[-1] == "despair" and texts.count("winter") == 1
        assert_orderly(played)


# Phrases that begin behind a pause: recording, and where it is cut, in seconds. The latter three begin with a soft f.
FIRST_WORDS = {
    "it": ("two_cities", 17.4),
    "we": ("two_cities", 21.0),
    "fail": ("beckett", 6.45),
    "fail again": ("beckett", 8.0),
    "for": ("two_cities", 36.85),
}


@pytest.mark.parametrize("lead_s", [0.7, 3.0])
@pytest.mark.parametrize("start", FIRST_WORDS)
def test_the_first_word_after_silence_is_the_one_of_an_ungated_run(start: str, lead_s: float) -> None:
    name, start_s = FIRST_WORDS[start]
    speech = clip(name, start_s, start_s + 2.0)
    whole = np.concatenate([silence(lead_s), speech, silence(0.7)])
    chunk = Chunk(SpeechSpan(0, len(whole)), whole, is_final=True)
    [ungated] = engine().decode([(engine().open(DecodeOptions()), chunk)])
    assert bare(play(whole).words[0].text) == bare(ungated.words[0].text) == start.split()[0]


# ---------------------------------------------------------------- times


def test_a_word_is_found_at_its_place_however_much_silence_was_skipped() -> None:
    """The same phrase at known places over a quarter of an hour: what is skipped counts, and nothing adds up."""
    phrase = hope()
    gaps_s = [0.7, 24.997, 61.003, 301.111, 600.507]  # at every phase of the detector's windows
    places_s, at_s, pieces = [], 0.0, []
    for gap_s in gaps_s:
        pieces += [silence(gap_s), phrase]
        at_s += len(pieces[-2]) / SAMPLE_RATE_HZ
        places_s.append(at_s)
        at_s += len(phrase) / SAMPLE_RATE_HZ
    played = run(live(np.concatenate([*pieces, silence(1.0)]), packet_samples=SAMPLE_RATE_HZ // 2))
    found_s = [word.start_s for word in played.words if bare(word.text) == "winter" and word.start_s is not None]
    assert len(found_s) == len(places_s)
    offsets_s = [found - place for found, place in zip(found_s, places_s, strict=True)]
    assert all(abs(offset - WINTER_S) <= 0.08 for offset in offsets_s)
    assert max(offsets_s) - min(offsets_s) <= 0.08


def test_times_do_not_drift_over_fifty_segments() -> None:
    """Far enough apart that none is told what the one before it said."""
    phrase = np.concatenate([clip("two_cities", 17.4, 19.0), silence(10.9)])
    played = run(live(np.concatenate([phrase] * 50), packet_samples=SAMPLE_RATE_HZ // 2), partial_interval_ms=10_000)
    found_s = [word.start_s for word in played.words if bare(word.text) == "spring" and word.start_s is not None]
    assert len(found_s) == 50
    offsets_s = [found - index * len(phrase) / SAMPLE_RATE_HZ for index, found in enumerate(found_s)]
    assert max(abs(offset - SPRING_S) for offset in offsets_s) <= 0.08
    assert abs(np.mean(offsets_s[:10]) - np.mean(offsets_s[-10:])) <= 0.02, "no trend"


# ---------------------------------------------------------------- packets and formats


def send(data: bytes, spec: m.AudioSpec, cuts: Sequence[int], bytes_per_s: int) -> Played:
    """``data`` in real time, cut at ``cuts``."""

    def inputs() -> Iterator[tuple[float, m.ClientMessage]]:
        yield 0.0, m.Hello(audio=spec)
        for begin, end in pairwise([0, *cuts, len(data)]):
            yield end / bytes_per_s, m.Audio(data[begin:end])
        yield len(data) / bytes_per_s, m.Bye()

    return run(inputs())


def random_cuts(n_bytes: int, seed: int) -> list[int]:
    return sorted(set(np.random.default_rng(seed).integers(1, n_bytes, 60).tolist()))


def test_packets_cut_at_any_byte_give_the_same_transcript() -> None:
    data = (np.concatenate([hope(), silence(1.0)]) * 32_767).astype("<i2").tobytes()
    played = [
        send(data, m.AudioSpec("s16le", SAMPLE_RATE_HZ), random_cuts(len(data), seed), 2 * SAMPLE_RATE_HZ)
        for seed in (1, 2)
    ]
    assert error_rate(HOPE_TEXT, played[0].text) == 0.0
    # What is settled early keeps the time and confidence that it had then; when that was depends on the packets.
    [one, other] = [[(word.text, word.start_s) for word in item.words] for item in played]
    assert [text for text, _ in one] == [text for text, _ in other]
    assert [start_s for _, start_s in one] == pytest.approx([start_s for _, start_s in other], abs=0.08)


def mulaw(samples: Samples) -> bytes:
    """G.711, by libsndfile."""
    file = io.BytesIO()
    soundfile.write(file, samples, 8_000, format="RAW", subtype="ULAW")
    return file.getvalue()


def test_telephone_and_stereo_audio_give_about_the_same_transcript() -> None:
    speech = np.concatenate([hope(), silence(1.0)])
    telephone = mulaw(soxr.resample(speech, SAMPLE_RATE_HZ, 8_000))
    mono = soxr.resample(speech, SAMPLE_RATE_HZ, 44_100)
    stereo = (np.stack([mono, 0.5 * mono], axis=1) * 32_767).astype("<i2").tobytes()
    for data, spec, bytes_per_s in (
        (telephone, m.AudioSpec("mulaw", 8_000), 8_000),
        (stereo, m.AudioSpec("s16le", 44_100, channels=2), 4 * 44_100),
    ):
        played = send(data, spec, random_cuts(len(data), seed=3), bytes_per_s)
        assert error_rate(HOPE_TEXT, played.text) <= 0.1
        assert not played.of(m.Warning)
        [spring] = [word for word in played.words if bare(word.text) == "spring"]
        assert spring.start_s == pytest.approx(SPRING_S, abs=0.1)
