"""Whether text through a door is the text through the native protocol: the same samples, turns and engine.

On a virtual clock, where a decode takes no time, so that both sides decode the same windows; what both ask for is
decoded once. Run from the project's root; prints Markdown:

    python -m benchmarks.door_texts > benchmarks/results/door_texts.md
    python -m benchmarks.door_texts --model spelling > benchmarks/results/door_requests.md
"""

import argparse
import base64
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import soxr
from numpy.typing import NDArray

from benchmarks.recordings import DEFAULT_MANIFEST
from benchmarks.remembering import (
    RememberingDetector,
    RememberingEngine,
    RememberingJudge,
    SpellingEngine,
    TossingJudge,
)
from benchmarks.report import heading
from gateway.audio_file import AudioFileError, read_audio
from gateway.config import DEFAULT_HANGOVER_MS, SessionConfig
from gateway.doors import (
    deepgram,
    deepgram_file,
    deepgram_turns,
    native,
    openai_realtime,
    openai_rest,
    openai_session,
    telephony,
)
from gateway.doors.door import Door, Frame, House, Knock
from gateway.effects import Close, Said
from gateway.messages import EngineItem
from gateway.pcm import AudioFormat, decode
from gateway.session import ServedModel, Session
from gateway.simulation import DoorSimulation, Simulation, Told
from streaming.engine import SpeechEngine
from vad.audio import SAMPLE_RATE_HZ
from vad.detector import SpeechDetector
from vad.energy import EnergyDetector
from vad.gate import GateSettings
from vad.turn import TurnDetector

Samples = NDArray[np.float32]  # [n_samples] at 16 kHz
Timed = tuple[float, Frame]

GATE = GateSettings(hangover_ms=DEFAULT_HANGOVER_MS)
SESSION = SessionConfig(partial_interval_ms=2_000)  # on both sides; with fewer partials more recordings can be compared
SPELLING = "spelling"
FRAME_S = 0.02
EXOTEL_FRAME_S = 0.1
TELEPHONE_HZ = 8_000


@dataclass(frozen=True)
class Recipe:
    """How a client of a door sends a recording, and what its final text is; and a native client that does the same."""

    open_door: Callable[[House], Door]
    frames: Callable[[Samples], Iterator[Timed]]
    text: Callable[[list[Frame]], str]  # of what the client is told, or who follows its call
    native_frames: Callable[[Samples], Iterator[Timed]]
    is_cut: bool = False  # the socket's end is the client's goodbye
    is_judged: bool = False  # pauses are judged by the model of turns


def knock(path: str, **query: str) -> Knock:
    """A handshake."""
    return Knock(path=path, query=tuple(query.items()))


def pcm(samples: Samples) -> bytes:
    """16 bits, as every protocol can carry them."""
    return (np.clip(samples, -1, 1) * 32_767).astype("<i2").tobytes()


def in_time(data: bytes, bytes_per_s: int, frame_s: float = FRAME_S) -> Iterator[tuple[float, bytes]]:
    """Frames of ``frame_s``, each when its last sample was spoken."""
    n_bytes = round(frame_s * bytes_per_s)
    for at in range(0, len(data), n_bytes):
        yield min(at + n_bytes, len(data)) / bytes_per_s, data[at : at + n_bytes]


def mulaw(samples: Samples) -> bytes:
    """One byte a sample, the nearest of the 256 values, at 8 kHz as telephones have it."""
    values = decode(bytes(range(256)), AudioFormat("mulaw", TELEPHONE_HZ)).samples
    order = np.argsort(values, kind="stable")
    edges = (values[order][1:] + values[order][:-1]) / 2
    codes: NDArray[np.uint8] = order[np.searchsorted(edges, narrow(samples))].astype(np.uint8)  # [n] at 8 kHz
    return codes.tobytes()


def narrow(samples: Samples) -> Samples:
    """The band of a telephone, at 8 kHz."""
    resampled: Samples = soxr.resample(samples, SAMPLE_RATE_HZ, TELEPHONE_HZ)
    return resampled


# ---------------------------------------------------------------- native


def _native_live(samples: Samples) -> Iterator[Timed]:
    yield 0.0, _hello()
    yield from in_time(pcm(samples), 2 * SAMPLE_RATE_HZ)
    yield len(samples) / SAMPLE_RATE_HZ, '{"type": "bye"}'


def _native_turns(samples: Samples) -> Iterator[Timed]:
    pauses = deepgram_turns.Thresholds().pauses_ms(is_punctuated=True, has_turn_model=False)
    hangover_ms, sentence_ms, _ = pauses
    [_, *rest] = _native_live(samples)
    yield 0.0, _hello(hangover_ms=hangover_ms, sentence_hangover_ms=sentence_ms)
    yield from rest


def _native_turns_judged(samples: Samples) -> Iterator[Timed]:
    thresholds = deepgram_turns.Thresholds()
    hangover_ms, sentence_ms, turn_ms = thresholds.pauses_ms(is_punctuated=True, has_turn_model=True)
    [_, *rest] = _native_live(samples)
    yield (
        0.0,
        _hello(
            hangover_ms=hangover_ms,
            sentence_hangover_ms=sentence_ms,
            turn_hangover_ms=turn_ms,
            turn_threshold=thresholds.eot_threshold,
        ),
    )
    yield from rest


def _native_semantic(samples: Samples) -> Iterator[Timed]:
    patience = openai_session.EAGERNESS["medium"]
    [_, *rest] = _native_live(samples)
    yield (
        0.0,
        _hello(
            hangover_ms=patience.longest_ms,
            sentence_hangover_ms=patience.doubted_ms,
            turn_hangover_ms=patience.done_ms,
            turn_threshold=patience.threshold,
            speech_threshold=openai_session.TurnDetection().threshold,
            pre_roll_ms=openai_session.MIN_PRE_ROLL_MS,
        ),
    )
    yield from rest


def _native_telephone(samples: Samples) -> Iterator[Timed]:
    yield 0.0, json.dumps({"type": "hello", "audio": {"encoding": "mulaw", "sample_rate_hz": TELEPHONE_HZ}})
    yield from in_time(mulaw(samples), TELEPHONE_HZ)
    yield len(samples) / SAMPLE_RATE_HZ, '{"type": "bye"}'


def _native_narrow(samples: Samples) -> Iterator[Timed]:
    yield 0.0, json.dumps({"type": "hello", "audio": {"encoding": "s16le", "sample_rate_hz": TELEPHONE_HZ}})
    yield from in_time(pcm(narrow(samples)), 2 * TELEPHONE_HZ, EXOTEL_FRAME_S)
    yield len(samples) / SAMPLE_RATE_HZ, '{"type": "bye"}'


def _native_at_once(samples: Samples) -> Iterator[Timed]:
    yield 0.0, _hello(partial_interval_ms=openai_rest.PARTIAL_INTERVAL_MS)
    for _, block in in_time(pcm(samples), 2 * SAMPLE_RATE_HZ, 1.0):
        yield 0.0, block
    yield 0.0, '{"type": "bye"}'


def _hello(**more: float | None) -> str:
    return json.dumps({"type": "hello", "audio": {"encoding": "s16le", "sample_rate_hz": SAMPLE_RATE_HZ}, **more})


def _native_text(frames: list[Frame]) -> str:
    messages = [json.loads(frame) for frame in frames]
    return " ".join(message["text"] for message in messages if message["type"] == "final" and message["text"])


# ---------------------------------------------------------------- OpenAI


def _realtime_live(samples: Samples) -> Iterator[Timed]:
    turns = {
        "type": "server_vad",
        "threshold": GATE.threshold,
        "prefix_padding_ms": GATE.pre_roll_ms,
        "silence_duration_ms": GATE.hangover_ms,
    }
    yield from _realtime(samples, turns)


def _realtime_semantic(samples: Samples) -> Iterator[Timed]:
    yield from _realtime(samples, {"type": "semantic_vad", "eagerness": "medium"})


def _realtime(samples: Samples, turns: Mapping[str, str | float]) -> Iterator[Timed]:
    given = {"format": {"type": "audio/pcm", "rate": SAMPLE_RATE_HZ}, "turn_detection": turns}
    yield 0.0, json.dumps({"type": "session.update", "session": {"audio": {"input": given}}})
    for at_s, data in in_time(pcm(samples), 2 * SAMPLE_RATE_HZ):
        audio = base64.b64encode(data).decode()
        yield at_s, json.dumps({"type": "input_audio_buffer.append", "audio": audio})
    yield len(samples) / SAMPLE_RATE_HZ, '{"type": "input_audio_buffer.commit"}'


def _realtime_text(frames: list[Frame]) -> str:
    events = [json.loads(frame) for frame in frames]
    kind = "conversation.item.input_audio_transcription.completed"
    return " ".join(event["transcript"] for event in events if event["type"] == kind and event["transcript"])


def _rest_at_once(samples: Samples) -> Iterator[Timed]:
    heard = np.frombuffer(pcm(samples), "<i2").astype("<f4") / np.float32(32_768)
    for at in range(0, len(heard), SAMPLE_RATE_HZ):
        yield 0.0, heard[at : at + SAMPLE_RATE_HZ].tobytes()
    yield 0.0, b""


def _rest_text(frames: list[Frame]) -> str:
    return str(json.loads(frames[-1])["text"])


# ---------------------------------------------------------------- Deepgram


def _deepgram_live(samples: Samples) -> Iterator[Timed]:
    yield from in_time(pcm(samples), 2 * SAMPLE_RATE_HZ)
    yield len(samples) / SAMPLE_RATE_HZ, '{"type": "CloseStream"}'


def _deepgram_text(frames: list[Frame]) -> str:
    results = [json.loads(frame) for frame in frames]
    finals = [result for result in results if result["type"] == "Results" and result["is_final"]]
    texts = [final["channel"]["alternatives"][0]["transcript"] for final in finals]
    return " ".join(text for text in texts if text)


def _turns_text(frames: list[Frame]) -> str:
    messages = [json.loads(frame) for frame in frames]
    ends = [message for message in messages if message["type"] == "TurnInfo" and message["event"] == "EndOfTurn"]
    return " ".join(end["transcript"] for end in ends if end["transcript"])


def _file_text(frames: list[Frame]) -> str:
    return str(json.loads(frames[-1])["results"]["channels"][0]["alternatives"][0]["transcript"])


_LISTEN = {"model": "nova-3", "encoding": "linear16", "sample_rate": "16000", "punctuate": "true"}

_TURNS = {"model": "flux-general-en", "encoding": "linear16", "sample_rate": "16000"}


# ---------------------------------------------------------------- telephony


def _twilio_live(samples: Samples) -> Iterator[Timed]:
    given = {"encoding": "audio/x-mulaw", "sampleRate": TELEPHONE_HZ, "channels": 1}
    yield 0.0, json.dumps({"event": "start", "start": {"callSid": "call", "mediaFormat": given}})
    yield from _media(in_time(mulaw(samples), TELEPHONE_HZ))
    yield len(samples) / SAMPLE_RATE_HZ, '{"event": "stop"}'


def _telnyx_live(samples: Samples) -> Iterator[Timed]:
    given = {"encoding": "PCMU", "sample_rate": TELEPHONE_HZ, "channels": 1}
    yield 0.0, json.dumps({"event": "start", "start": {"call_control_id": "call", "media_format": given}})
    yield from _media(in_time(mulaw(samples), TELEPHONE_HZ))
    yield len(samples) / SAMPLE_RATE_HZ, '{"event": "stop"}'


def _plivo_live(samples: Samples) -> Iterator[Timed]:
    given = {"encoding": "audio/x-mulaw", "sampleRate": TELEPHONE_HZ}
    yield 0.0, json.dumps({"event": "start", "start": {"callId": "call", "mediaFormat": given}})
    yield from _media(in_time(mulaw(samples), TELEPHONE_HZ), first_ms=1_700_000_000_000)


def _plivo_wide_live(samples: Samples) -> Iterator[Timed]:
    given = {"encoding": "audio/x-l16", "sampleRate": SAMPLE_RATE_HZ}
    yield 0.0, json.dumps({"event": "start", "start": {"callId": "call", "mediaFormat": given}})
    yield from _media(in_time(pcm(samples), 2 * SAMPLE_RATE_HZ), first_ms=1_700_000_000_000)


def _exotel_live(samples: Samples) -> Iterator[Timed]:
    given = {"encoding": "base64", "sample_rate": str(TELEPHONE_HZ)}
    yield 0.0, json.dumps({"event": "start", "start": {"call_sid": "call", "media_format": given}})
    yield from _media(in_time(pcm(narrow(samples)), 2 * TELEPHONE_HZ, EXOTEL_FRAME_S), frame_ms=100)
    yield len(samples) / SAMPLE_RATE_HZ, '{"event": "stop"}'


def _media(frames: Iterator[tuple[float, bytes]], *, first_ms: int = 0, frame_ms: int = 20) -> Iterator[Timed]:
    """Messages as most carriers send them, numbers as strings."""
    for index, (at_s, data) in enumerate(frames):
        order = {"track": "inbound", "chunk": str(index + 1), "timestamp": str(first_ms + frame_ms * index)}
        yield at_s, json.dumps({"event": "media", "media": {**order, "payload": base64.b64encode(data).decode()}})


def _vonage_live(samples: Samples) -> Iterator[Timed]:
    yield 0.0, json.dumps({"event": "websocket:connected", "content-type": f"audio/l16;rate={SAMPLE_RATE_HZ}"})
    yield from in_time(pcm(samples), 2 * SAMPLE_RATE_HZ)


def _asterisk_live(samples: Samples) -> Iterator[Timed]:
    yield 0.0, "MEDIA_START connection_id:id channel:x channel_id:call format:slin16 optimal_frame_size:640 ptime:20"
    yield from in_time(pcm(samples), 2 * SAMPLE_RATE_HZ)


def _freeswitch_live(samples: Samples) -> Iterator[Timed]:
    yield 0.0, '{"caller": "anybody"}'
    yield from in_time(pcm(samples), 2 * SAMPLE_RATE_HZ)


def _audiosocket_live(samples: Samples) -> Iterator[Timed]:
    yield 0.0, b"\x01" + bytes(16)
    for at_s, data in in_time(pcm(samples), 2 * SAMPLE_RATE_HZ):
        yield at_s, b"\x12" + data
    yield len(samples) / SAMPLE_RATE_HZ, b"\x00"


def _freeswitch_text(frames: list[Frame]) -> str:
    """Of what followers are told; the switch itself is told the same once more."""
    return _native_text([frame for frame in frames if json.loads(frame)["type"] != "transcription"])


def _call(provider: str, **query: str) -> Callable[[House], Door]:
    return lambda house: telephony.open_door(knock(f"/telephony/{provider}", **query), house).door


RECIPES: Mapping[str, Recipe] = {
    "deepgram": Recipe(
        lambda house: deepgram.open_door(knock("/v1/listen", **_LISTEN), house).door,
        _deepgram_live,
        _deepgram_text,
        _native_live,
    ),
    "deepgram_file": Recipe(
        lambda house: deepgram_file.open_door(knock("/v1/listen", model="nova-3", punctuate="true"), house).door,
        _rest_at_once,
        _file_text,
        _native_at_once,
    ),
    "deepgram_turns": Recipe(
        lambda house: deepgram_turns.open_door(knock("/v2/listen", **_TURNS), house).door,
        _deepgram_live,
        _turns_text,
        _native_turns,
    ),
    "openai_realtime": Recipe(
        lambda house: openai_realtime.open_door(knock("/v1/realtime"), house).door,
        _realtime_live,
        _realtime_text,
        _native_live,
    ),
    "openai_semantic": Recipe(
        lambda house: openai_realtime.open_door(knock("/v1/realtime"), house).door,
        _realtime_semantic,
        _realtime_text,
        _native_semantic,
        is_judged=True,
    ),
    "deepgram_turns_judged": Recipe(
        lambda house: deepgram_turns.open_door(knock("/v2/listen", **_TURNS), house).door,
        _deepgram_live,
        _turns_text,
        _native_turns_judged,
        is_judged=True,
    ),
    "openai_rest": Recipe(
        lambda house: openai_rest.open_door(knock("/v1/audio/transcriptions", model="whisper-1"), house).door,
        _rest_at_once,
        _rest_text,
        _native_at_once,
    ),
    "twilio": Recipe(_call("twilio"), _twilio_live, _native_text, _native_telephone),
    "telnyx": Recipe(_call("telnyx"), _telnyx_live, _native_text, _native_telephone),
    "plivo": Recipe(_call("plivo"), _plivo_live, _native_text, _native_telephone, is_cut=True),
    "plivo_16_khz": Recipe(_call("plivo"), _plivo_wide_live, _native_text, _native_live, is_cut=True),
    "exotel": Recipe(_call("exotel"), _exotel_live, _native_text, _native_narrow),
    "vonage": Recipe(_call("vonage"), _vonage_live, _native_text, _native_live, is_cut=True),
    "asterisk": Recipe(_call("asterisk"), _asterisk_live, _native_text, _native_live, is_cut=True),
    "freeswitch": Recipe(
        _call("freeswitch", rate=str(SAMPLE_RATE_HZ)), _freeswitch_live, _freeswitch_text, _native_live, is_cut=True
    ),
    "audiosocket": Recipe(
        lambda house: telephony.audiosocket_door(knock(""), house), _audiosocket_live, _native_text, _native_live
    ),
}


# ---------------------------------------------------------------- runs


@dataclass(frozen=True)
class Models:
    """What computes, on both sides."""

    engine: SpeechEngine
    detector: SpeechDetector
    judge: TurnDetector


def text_through(recipe: Recipe, samples: Samples, models: Models) -> tuple[str, str]:
    """The final text through the door, and through the native protocol."""
    there = native_text(recipe, samples, models)
    return door_text(recipe, samples, models), there


def door_text(recipe: Recipe, samples: Samples, models: Models) -> str:
    """The final text through the door."""
    door = recipe.open_door(_house(recipe, models))
    return recipe.text(_run(recipe, door, recipe.frames(samples), models, is_cut=recipe.is_cut))


def native_text(recipe: Recipe, samples: Samples, models: Models) -> str:
    """The final text of a native client that does the same."""
    door = native.open_door(knock("/v1/stream"), _house(recipe, models)).door
    return _native_text(_run(recipe, door, recipe.native_frames(samples), models, is_cut=False))


def _house(recipe: Recipe, models: Models) -> House:
    card = models.engine.card
    return House({card.name: card}, GATE, SESSION, has_turn_model=recipe.is_judged)


def _run(recipe: Recipe, door: Door, frames: Iterator[Timed], models: Models, *, is_cut: bool) -> list[Frame]:
    engine, detector = models.engine, models.detector
    served = {engine.card.name: ServedModel(engine.card, EngineItem(engine.backend, engine.why))}
    turn_model = models.judge.name if recipe.is_judged else None

    def open_session(now_s: float, hear: Callable[[Said, float], None]) -> Simulation:
        state = detector.initial_state()
        session = Session("session", served, state, config=SESSION, gate=GATE, now_s=now_s, turn_model=turn_model)
        return Simulation(session, engine, detector, hear=hear, turn_detector=models.judge)

    simulation = DoorSimulation(door, open_session)
    told: list[Told] = simulation.run(frames, is_cut=is_cut)
    published = [json.dumps(event.event) for event in simulation.published]
    return [*(item.frame for item in told if not isinstance(item.frame, Close)), *published]


def same_words(here: str, there: str) -> bool:
    """Whether two texts are one, but for the spaces where their segments join."""
    return here.split() == there.split() or "".join(here.split()) == "".join(there.split())


@dataclass(slots=True)
class Tally:
    """What came of one door."""

    n_compared: int = 0
    n_with_text: int = 0
    n_decoded: int = 0  # for the door alone: chunks that the native side had not asked for
    differing: list[str] = field(default_factory=list)

    def add(self, recording_id: str, here: str, there: str, n_decoded: int) -> None:
        """Count one recording."""
        self.n_compared += 1
        self.n_with_text += bool(there)
        self.n_decoded += n_decoded
        if not same_words(here, there):
            self.differing.append(recording_id)


def readable(manifest: Path, every: int) -> Iterator[tuple[str, Samples]]:
    """Every recording that the server reads, by its id, whether or not its words are known."""
    lines = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines() if line.strip()]
    for line in lines[::every]:
        try:
            yield line["id"], read_audio(manifest.parent / line["file"])[0]
        except AudioFileError:
            continue


def _spelling() -> tuple[RememberingEngine, RememberingDetector, RememberingJudge]:
    """All that costs next to nothing."""
    return RememberingEngine(SpellingEngine()), RememberingDetector(EnergyDetector()), RememberingJudge(TossingJudge())


def _real(model: str) -> tuple[RememberingEngine, RememberingDetector, RememberingJudge]:
    """What a server has."""
    from models.catalog import load_engine
    from models.smart_turn import SmartTurn
    from models.store import turn_model
    from vad.levels import TwoLevelDetector
    from vad.silero import SileroDetector

    engine, judge = load_engine(model, n_threads=1), SmartTurn(turn_model())
    detector = TwoLevelDetector(SileroDetector())
    return RememberingEngine(engine), RememberingDetector(detector), RememberingJudge(judge)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="whisper-tiny.en", help=f"or {SPELLING}, which costs nothing")
    parser.add_argument("--manifest", type=Path, default=DEFAULT_MANIFEST)
    parser.add_argument("--every", type=int, default=1, help="take every nth recording")
    parser.add_argument("--doors", nargs="+", choices=RECIPES, default=list(RECIPES), help="all unless some are named")
    arguments = parser.parse_args()
    is_spelt = arguments.model == SPELLING
    engine, detector, judge = _spelling() if is_spelt else _real(arguments.model)
    tallies = {name: Tally() for name in arguments.doors}
    for recording_id, samples in readable(arguments.manifest, arguments.every):
        print(recording_id, file=sys.stderr)
        models, natives = Models(engine, detector, judge), dict[Callable[[Samples], Iterator[Timed]], str]()
        for name, tally in tallies.items():
            recipe = RECIPES[name]
            if recipe.native_frames not in natives:
                natives[recipe.native_frames] = native_text(recipe, samples, models)
            n_decoded = engine.n_decoded
            here = door_text(recipe, samples, models)
            tally.add(recording_id, here, natives[recipe.native_frames], engine.n_decoded - n_decoded)
        for memory in (engine, detector, judge):
            memory.forget()
    print(heading("Text through each door against the native protocol"))
    print("Final text of the same samples with the same turn settings, on a virtual clock: every recording that the")
    print(
        "server reads. Carriers send μ-law at 8 kHz (`exotel`: 16-bit samples at 8 kHz), and so does the native side."
    )
    print("What the native side asks of the model is not computed anew for a door; `decoded anew` counts what is.")
    if is_spelt:
        print("The model spells its samples: whatever differs in what it is asked, one sample say, is another text.")
        print("Speech is told by its loudness, and the model of turns answers by the hash of what it hears.")
    print()
    print("| door | recordings | with text | same text | differing | decoded anew |")
    print("|---|---|---|---|---|---|")
    for name, tally in tallies.items():
        n_same = tally.n_compared - len(tally.differing)
        counts = f"{tally.n_compared} | {tally.n_with_text} | {n_same} | {', '.join(tally.differing) or 'none'}"
        print(f"| `{name}` | {counts} | {tally.n_decoded} |")


if __name__ == "__main__":
    main()
