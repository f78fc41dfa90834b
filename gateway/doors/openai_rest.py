"""The door of the OpenAI REST protocol: a recording in, its transcript out, in one of six shapes.

Knows the request's fields and the bodies of the answer. The request's audio comes as frames of 32-bit floats at 16 kHz
and ends with an empty one; a transcript is what a session says of them. Speakers are told apart by channels only, each
with a session of its own. Does not know forms, files or HTTP.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from string import ascii_uppercase
from typing import Any

import msgspec

from gateway.doors.door import (
    Admission,
    AdmissionError,
    DoorEffect,
    Drop,
    Frame,
    House,
    Knock,
    LastWords,
    Open,
    Say,
    Tell,
    brief,
)
from gateway.doors.openai_common import error_body, key_of, logprobs, refusal
from gateway.doors.openai_session import (
    HOSTED_MODELS,
    BadValueError,
    TranscriptionSession,
    TurnDetection,
    language_of,
    turn_detection_of,
)
from gateway.doors.settled import SettledText
from gateway.effects import Close, Said
from gateway.errors import GatewayError
from gateway.messages import Audio, AudioSpec, Bye, Error, Farewell, Final, Hello, Partial, WordItem
from gateway.pcm import MAX_CHANNELS
from gateway.subtitles import Cue, TimedWord, as_srt, as_vtt, cues_of
from streaming.capability import Capability
from streaming.engine import DecodeOptions, Task, UnsupportedOptionError
from vad.audio import SAMPLE_RATE_HZ

__all__ = ["NAME", "RESUMES", "key_of", "open_door", "refusal"]

NAME = "openai_rest"
RESUMES = False
TRANSLATIONS_PATH = "/v1/audio/translations"
DIARIZED = "diarized_json"
FORMATS = ("json", "text", "srt", "verbose_json", "vtt", DIARIZED)
MAX_SPEAKERS = 4  # upstream's own limit for names
# A recording is there as fast as it can be read, so partials of it would only be thrown away; a stream wants some.
PARTIAL_INTERVAL_MS, STREAMED_PARTIAL_INTERVAL_MS = 10_000, 2_000
_CONTENT_TYPES = {
    "json": "application/json",
    "verbose_json": "application/json",
    DIARIZED: "application/json",
    "text": "text/plain; charset=utf-8",
    "srt": "application/x-subrip; charset=utf-8",
    "vtt": "text/vtt; charset=utf-8",
}
_STATUS = {"server_full": 503, "shutting_down": 503}


@dataclass(frozen=True, slots=True)
class _Request:
    """What a request asks for."""

    hello: Hello
    response_format: str
    has_words: bool
    has_segments: bool
    has_logprobs: bool
    is_streamed: bool
    speakers: tuple[str, ...] = ()  # of each channel's, where they are told apart

    @property
    def n_tracks(self) -> int:
        """Channels that are heard by themselves."""
        return max(1, len(self.speakers))


class TranscriptionDoor:
    """One request."""

    next_wake_s = None

    def __init__(self, request: _Request) -> None:
        self._request = request
        self._spoken: list[tuple[int, Final]] = []  # with its track
        self._n_over = 0
        self._settled = SettledText()  # of a streamed answer
        self._failure: str | None = None

    def opened(self, now_s: float) -> list[DoorEffect]:
        """A session for the recording, or for each of its channels."""
        n_tracks = self._request.n_tracks
        effects: list[DoorEffect] = []
        for track in range(n_tracks):
            spec = AudioSpec("f32le", SAMPLE_RATE_HZ, n_tracks, track if n_tracks > 1 else None)
            effects += [Open(track), Tell(track, msgspec.structs.replace(self._request.hello, audio=spec))]
        return effects

    def receive(self, frame: Frame, now_s: float) -> list[DoorEffect]:
        """Audio; an empty frame is its end."""
        assert isinstance(frame, bytes), "the audio of a request is bytes"
        return [Tell(track, Audio(frame) if frame else Bye()) for track in range(self._request.n_tracks)]

    def heard(self, track: int, said: Said, now_s: float) -> Sequence[DoorEffect]:
        """Collect the finals, or send what settles."""
        match said:
            case Partial():
                return self._delta(said)
            case Final():
                self._spoken.append((track, said))
                return self._delta(said)
            case Error():
                self._failure = said.message
                return []
            case Farewell():
                self._n_over += 1
                return self._answer(said.audio_s) if self._n_over == self._request.n_tracks else []
            case _:
                return []

    def wake(self, now_s: float) -> list[DoorEffect]:
        """Never asked for."""
        return []

    def peer_gone(self, now_s: float) -> list[DoorEffect]:
        """Nobody waits for the answer."""
        return [Drop(track) for track in range(self._request.n_tracks)]

    def failed(self, error: GatewayError) -> list[LastWords]:
        """An error body."""
        status = _STATUS.get(error.code, 500)
        return self._error(status, error.code, str(error))

    @property
    def _finals(self) -> list[Final]:
        """In the order spoken, whoever spoke."""
        return [final for _, final in sorted(self._spoken, key=lambda pair: pair[1].start_s)]

    def _delta(self, segment: Partial | Final) -> list[DoorEffect]:
        if not self._request.is_streamed:
            return []
        if self._request.speakers:
            is_whole = isinstance(segment, Final) and segment.words
            return [Say(f"data: {_json(self._turn(len(self._spoken) - 1))}\n\n")] if is_whole else []
        words = self._settled.news(segment)
        delta = self._settled.delta(words)
        return [self._event("transcript.text.delta", delta=delta, **self._logprobs(words))] if delta else []

    def _answer(self, audio_s: float) -> list[DoorEffect]:
        if self._failure is not None:
            return [*self._error(500, "decode_failed", self._failure)]
        usage = {"type": "duration", "seconds": round(audio_s, 3)}
        if self._request.is_streamed:
            text = self._text() if self._request.speakers else self._settled.text
            done = self._event("transcript.text.done", text=text, usage=usage, **self._all_logprobs())
            return [done, Close(200, "done")]
        return [Say(self._body(usage, audio_s)), Close(200, "done")]

    def _body(self, usage: dict[str, Any], audio_s: float) -> str:
        match self._request.response_format:
            case "text":
                return f"{self._text()}\n"
            case "srt":
                return as_srt(self._cues())
            case "vtt":
                return as_vtt(self._cues())
            case "verbose_json":
                return _json(self._verbose(usage, audio_s))
            case "diarized_json":
                order = sorted(range(len(self._spoken)), key=lambda number: self._spoken[number][1].start_s)
                turns = [self._turn(number) for number in order if self._spoken[number][1].words]
                body = {"task": "transcribe", "duration": round(audio_s, 3), "text": self._text(), "segments": turns}
                return _json({**body, "usage": usage})
            case _:
                languages = sorted({final.language for final in self._finals if final.language})
                named = {"languages": [{"code": code} for code in languages]} if languages else {}
                return _json({"text": self._text(), **named, **self._all_logprobs(), "usage": usage})

    def _verbose(self, usage: dict[str, Any], audio_s: float) -> dict[str, Any]:
        task = self._request.hello.task
        languages = [final.language for final in self._finals if final.language]
        body: dict[str, Any] = {
            "task": "translate" if task == Task.TRANSLATE else "transcribe",
            "language": max(languages, key=languages.count) if languages else None,
            "duration": round(audio_s, 3),
            "text": self._text(),
        }
        if self._request.has_segments:
            body["segments"] = [_segment(number, final) for number, final in enumerate(self._finals)]
        if self._request.has_words:
            body["words"] = [
                {"word": word.text.strip(), "start": word.start_s, "end": word.end_s} for word in self._words()
            ]
        return {**body, "usage": usage}

    def _turn(self, number: int) -> dict[str, Any]:
        """What somebody said in one go."""
        track, final = self._spoken[number]
        return {
            "type": "transcript.text.segment",
            "id": f"seg_{number}",
            "start": final.start_s,
            "end": final.end_s,
            "text": "".join(word.text for word in final.words),
            "speaker": self._request.speakers[track],
        }

    def _text(self) -> str:
        return "".join(word.text for word in self._words()).strip()

    def _words(self) -> list[WordItem]:
        return [word for final in self._finals for word in final.words]

    def _cues(self) -> list[Cue]:
        return [
            cue
            for final in self._finals
            for cue in cues_of(
                [TimedWord(word.text, word.start_s, word.end_s) for word in final.words], final.start_s, final.end_s
            )
        ]

    def _all_logprobs(self) -> dict[str, Any]:
        return self._logprobs(self._words())

    def _logprobs(self, words: Sequence[WordItem]) -> dict[str, Any]:
        return {"logprobs": logprobs(words)} if self._request.has_logprobs else {}

    def _event(self, kind: str, **fields: Any) -> Say:  # Any: JSON
        return Say(f"data: {_json({'type': kind, **fields})}\n\n")

    def _error(self, status: int, code: str, message: str) -> list[LastWords]:
        """A body with a status, or an event in a stream that began with 200."""
        body = error_body(status, code, message)
        if self._request.is_streamed:
            return [self._event("error", **body), Close(status, code)]
        return [Say(_json(body)), Close(status, code)]


def _segment(number: int, final: Final) -> dict[str, Any]:
    """A segment; what this server does not know of it is null, not made up."""
    text = "".join(word.text for word in final.words)
    known = [item["logprob"] for item in logprobs(final.words) if item["logprob"] is not None]
    raw = text.encode()
    return {
        "id": number,
        "seek": round(final.start_s * 100),
        "start": final.start_s,
        "end": final.end_s,
        "text": text,
        "tokens": [],
        "temperature": None,
        "avg_logprob": round(sum(known) / len(known), 4) if known else None,
        "compression_ratio": round(len(raw) / len(zlib.compress(raw)), 3) if raw else None,
        "no_speech_prob": None,
    }


def _json(body: dict[str, Any]) -> str:
    return msgspec.json.encode(body).decode()


# ---------------------------------------------------------------- the request


def open_door(knock: Knock, house: House) -> Admission:
    """A door for the request whose form fields stand in ``knock.query``."""
    fields = _Fields(knock.query)
    try:
        request = _request(fields, house, knock.n_channels, translates=knock.path == TRANSLATIONS_PATH)
    except BadValueError as error:
        status = 404 if error.code == "model_not_found" else 400
        raise AdmissionError(status, error.code, str(error), param=error.param) from error
    if fields.ignored and house.is_strict:
        said = f"without effect on this server: {', '.join(fields.ignored)}"
        raise AdmissionError(400, "invalid_value", said, param=fields.ignored[0])
    ignored = {"X-Senseway-Ignored": ", ".join(fields.ignored)} if fields.ignored else {}
    kind = "text/event-stream" if request.is_streamed else _CONTENT_TYPES[request.response_format]
    headers = {"Content-Type": kind, **ignored}
    door = TranscriptionDoor(request)
    return Admission(door, headers=headers, is_streamed=request.is_streamed, takes_channels=bool(request.speakers))


class _Fields:
    """The form's fields; lists come as ``name``, repeated, or as ``name[]``, objects as JSON or as ``name[key]``."""

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._pairs = pairs
        self.ignored: list[str] = []  # asked for, harmless, and without effect here

    def one(self, name: str) -> str | None:
        return dict(self._pairs).get(name)

    def many(self, name: str) -> list[str]:
        return [value for key, value in self._pairs if key in (name, f"{name}[]")]

    def some(self, name: str) -> dict[str, str]:
        """The parts of an object that came as fields of their own."""
        return {key[len(name) + 1 : -1]: value for key, value in self._pairs if key.startswith(f"{name}[")}


def _request(fields: _Fields, house: House, n_channels: int, *, translates: bool) -> _Request:
    name = fields.one("model")
    if not name:
        raise BadValueError("model", "model is missing", code="missing_required_parameter")
    model = house.model_named(name, foreign=HOSTED_MODELS)
    if model is None:
        known = ", ".join(house.cards)
        raise BadValueError("model", f"no model {name!r} here; there are {known}", code="model_not_found")
    response_format = fields.one("response_format") or "json"
    if response_format not in FORMATS:
        raise BadValueError(
            "response_format", f"response_format is {response_format!r}; accepted are {', '.join(FORMATS)}"
        )
    speakers = _speakers(fields, response_format, n_channels)
    is_streamed = _flag(fields.one("stream"), "stream")
    if is_streamed and response_format not in ("json", "text", DIARIZED):
        raise BadValueError("stream", f"response_format {response_format} comes in one piece; json can be streamed")
    granularities = _granularities(fields, response_format)
    if fields.one("temperature") not in (None, "", "0", "0.0"):
        fields.ignored.append("temperature")
    card = house.cards[model]
    has_logprobs = "logprobs" in fields.many("include")
    if has_logprobs and Capability.CONFIDENCE not in card.capabilities:
        raise BadValueError("include", f"{model} has no confidence, so no logprobs")
    session = _session(fields, model, translates=translates)
    options = DecodeOptions(
        language=session.language,
        task=Task.TRANSLATE if translates else Task.TRANSCRIBE,
        vocabulary=session.keywords,
        context=session.prompt,
    )
    try:
        card.check(options)
    except UnsupportedOptionError as error:
        raise BadValueError("model" if translates else "language", str(error)) from error
    hello = replace_hello(session.hello(house), options, is_streamed=is_streamed)
    return _Request(
        hello=hello,
        response_format=response_format,
        has_words="word" in granularities,
        has_segments="segment" in granularities,
        has_logprobs=has_logprobs,
        is_streamed=is_streamed,
        speakers=speakers,
    )


def _speakers(fields: _Fields, response_format: str, n_channels: int) -> tuple[str, ...]:
    """A name for each channel: those given, in the order of the channels, else A, B and so on."""
    names = fields.many("known_speaker_names")
    if fields.many("known_speaker_references"):
        said = "speakers are told apart by channels here, not by how they sound"
        raise BadValueError("known_speaker_references", said)
    if response_format != DIARIZED:
        if names:
            raise BadValueError("known_speaker_names", f"known_speaker_names go with response_format {DIARIZED}")
        return ()
    if not 2 <= n_channels <= MAX_CHANNELS:
        said = (
            f"speakers are told apart by channels here: 2 to {MAX_CHANNELS} are needed, the recording has {n_channels}"
        )
        raise BadValueError("response_format", said)
    if len(names) > min(MAX_SPEAKERS, n_channels):
        raise BadValueError(
            "known_speaker_names", f"{len(names)} names for {min(MAX_SPEAKERS, n_channels)} speakers at most"
        )
    if len(set(names)) < len(names):
        raise BadValueError("known_speaker_names", "two speakers have one name")
    letters = (letter for letter in ascii_uppercase[len(names) :] if letter not in names)
    return (*names, *islice(letters, n_channels - len(names)))


def replace_hello(hello: Hello, options: DecodeOptions, *, is_streamed: bool) -> Hello:
    """``hello`` for a recording that was decoded from its file already."""
    interval_ms = STREAMED_PARTIAL_INTERVAL_MS if is_streamed else PARTIAL_INTERVAL_MS
    return msgspec.structs.replace(
        hello, audio=AudioSpec("f32le", SAMPLE_RATE_HZ), task=options.task.value, partial_interval_ms=interval_ms
    )


def _session(fields: _Fields, model: str, *, translates: bool) -> TranscriptionSession:
    """What the realtime session object would be; without a chunking strategy turns end as the server is set up."""
    languages = fields.many("language") or fields.many("languages")
    session = TranscriptionSession(
        model,
        language=None if translates else language_of(languages, "language"),
        prompt=fields.one("prompt") or "",
        keywords=tuple(word for word in fields.many("keywords") if word),
        turn_detection=_chunking(fields),
    )
    return session


def _chunking(fields: _Fields) -> TurnDetection | None:
    given: dict[str, Any] = dict(fields.some("chunking_strategy"))
    text = fields.one("chunking_strategy")
    if text in ("auto", None, "") and not given:
        return None
    if text:
        try:
            given = msgspec.json.decode(text, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise BadValueError(
                "chunking_strategy", f"chunking_strategy is {brief(repr(text))}; accepted are 'auto' and an object"
            ) from error
    turns = turn_detection_of({key: _number(value) for key, value in given.items()}, "chunking_strategy")
    if turns is not None and turns.eagerness is not None:
        raise BadValueError("chunking_strategy.type", "chunking_strategy takes 'auto' and server_vad")
    return turns


def _number(value: Any) -> Any:
    """A form has only text, where the object that it stands for has numbers."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _granularities(fields: _Fields, response_format: str) -> list[str]:
    given = fields.many("timestamp_granularities")
    if wrong := [item for item in given if item not in ("word", "segment")]:
        raise BadValueError("timestamp_granularities", f"{wrong[0]!r} is no granularity; there are word and segment")
    if given and response_format != "verbose_json":
        raise BadValueError("timestamp_granularities", "timestamp_granularities go with response_format verbose_json")
    return given or ["segment"]


def _flag(value: str | None, name: str) -> bool:
    if value is None or value.lower() in ("false", "0", ""):
        return False
    if value.lower() in ("true", "1"):
        return True
    raise BadValueError(name, f"{name} is {value!r}; accepted are true and false")
