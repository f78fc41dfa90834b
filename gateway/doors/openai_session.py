"""The session object of the OpenAI Realtime protocol for transcription: defaults, updates, effective values. Pure.

Knows the object's fields and what this server makes of them: what is out of range is clamped and reported as it is in
force, what can't be honoured is refused with the path of the field. Does not know events, turns or audio.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gateway.doors.door import House, brief
from gateway.messages import DEFAULT_TURN_THRESHOLD, AudioSpec, Hello, Update
from streaming.capability import Capability
from streaming.engine import DecodeOptions, UnsupportedOptionError

# Beginnings of the hosted service's own model names: clients that were written for it mean "whatever transcribes here".
HOSTED_MODELS = ("gpt-", "whisper-1")
LOGPROBS = "item.input_audio_transcription.logprobs"
WARNINGS = "senseway.warning"  # an extension: events for what is only half honoured

MIN_THRESHOLD, MAX_THRESHOLD = 0.05, 0.95
MAX_PREFIX_MS = 2_000
MIN_PRE_ROLL_MS = 300  # less would cost first syllables, so the model hears this much at least
MIN_SILENCE_MS, MAX_SILENCE_MS = 100, 10_000
MAX_NUMBER = 1e9  # beyond any setting
MAX_KEYWORDS, MAX_KEYWORD_CHARACTERS, MAX_PROMPT_CHARACTERS = 1_000, 100, 4_000
PCM_RATES_HZ = range(8_000, 48_001)
PARTIAL_INTERVAL_MS = {"minimal": 200, "low": 300, "medium": 500, "high": 800, "xhigh": 1_500}  # of ``delay``
_ENCODINGS = {"audio/pcm": "s16le", "audio/pcmu": "mulaw", "audio/pcma": "alaw"}


@dataclass(frozen=True, slots=True)
class Patience:
    """How much silence ends a turn under ``semantic_vad``, by what speaks for its end."""

    longest_ms: int  # nothing does; the protocol's own figures
    doubted_ms: int  # the words read as a finished sentence, but the model of turns takes the speaker not to be done
    done_ms: int  # the model takes the speaker to be done; without a model, the words read as a finished sentence
    threshold: float  # the model's probability from which that is so


# Ours but for the longest; benchmarks/results/turns.md has what they cost and bring.
EAGERNESS = {
    "low": Patience(longest_ms=8_000, doubted_ms=2_500, done_ms=800, threshold=0.7),
    "medium": Patience(longest_ms=4_000, doubted_ms=1_500, done_ms=500, threshold=0.6),
    "high": Patience(longest_ms=2_000, doubted_ms=1_000, done_ms=300, threshold=0.5),
}


class BadValueError(Exception):
    """A field that can't be taken; ``param`` is its path."""

    def __init__(self, param: str, message: str, *, code: str = "invalid_value") -> None:
        self.param = param
        self.code = code
        super().__init__(brief(message))


@dataclass(frozen=True, slots=True)
class TurnDetection:
    """How turns end, as it is in force: ``server_vad``, or ``semantic_vad`` where there is an ``eagerness``."""

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500
    eagerness: str | None = None

    @property
    def patience(self) -> Patience | None:
        """Of ``semantic_vad``."""
        return None if self.eagerness is None else EAGERNESS[self.eagerness]

    def plain(self) -> dict[str, Any]:
        """As events show it."""
        if self.eagerness is not None:
            return {"type": "semantic_vad", "eagerness": self.eagerness}
        return {
            "type": "server_vad",
            "threshold": self.threshold,
            "prefix_padding_ms": self.prefix_padding_ms,
            "silence_duration_ms": self.silence_duration_ms,
            "idle_timeout_ms": None,
        }


@dataclass(frozen=True, slots=True)
class TranscriptionSession:
    """What a session does. A value: an update makes a new one."""

    model: str
    format_type: str = "audio/pcm"
    rate_hz: int = 24_000
    language: str | None = None
    prompt: str = ""
    keywords: tuple[str, ...] = ()
    delay: str | None = None
    turn_detection: TurnDetection | None = TurnDetection()
    include: tuple[str, ...] = ()

    @property
    def audio_spec(self) -> AudioSpec:
        """The format of appended audio."""
        return AudioSpec(_ENCODINGS[self.format_type], self.rate_hz)

    @property
    def bytes_per_s(self) -> int:
        """Of appended audio."""
        return self.rate_hz * (2 if self.format_type == "audio/pcm" else 1)

    @property
    def options(self) -> DecodeOptions:
        """What the model is asked for."""
        return DecodeOptions(language=self.language, vocabulary=self.keywords, context=self.prompt)

    def hello(self, house: House) -> Hello:
        """The first message of a session that does this."""
        settings = self.update("", house)
        return Hello(
            audio=self.audio_spec,
            model=self.model,
            language=settings.language,
            vocabulary=settings.vocabulary,
            context=settings.context,
            hangover_ms=settings.hangover_ms,
            sentence_hangover_ms=settings.sentence_hangover_ms,
            turn_hangover_ms=settings.turn_hangover_ms,
            turn_threshold=settings.turn_threshold,
            speech_threshold=settings.speech_threshold,
            pre_roll_ms=settings.pre_roll_ms,
            partial_interval_ms=settings.partial_interval_ms,
        )

    def update(self, update_id: str, house: House) -> Update:
        """The message that changes a session to this; format and model are not settings."""
        turns = self.turn_detection
        patience = turns.patience if turns else None
        judged = patience if house.has_turn_model else None
        by_text_ms = None if patience is None else patience.doubted_ms if judged else patience.done_ms
        interval_ms = house.session.partial_interval_ms if self.delay is None else PARTIAL_INTERVAL_MS[self.delay]
        return Update(
            id=update_id,
            language=self.language,
            vocabulary=self.keywords,
            context=self.prompt,
            hangover_ms=turns.silence_duration_ms if turns else house.gate.hangover_ms,
            sentence_hangover_ms=by_text_ms if _punctuates(self.model, house) else None,
            turn_hangover_ms=judged.done_ms if judged else None,
            turn_threshold=judged.threshold if judged else DEFAULT_TURN_THRESHOLD,
            speech_threshold=turns.threshold if turns else house.gate.threshold,
            pre_roll_ms=max(MIN_PRE_ROLL_MS, turns.prefix_padding_ms) if turns else house.gate.pre_roll_ms,
            partial_interval_ms=interval_ms,
        )

    def plain(self) -> dict[str, Any]:
        """The session object as events show it: what is in force."""
        pcm = {"type": "audio/pcm", "rate": self.rate_hz}
        return {
            "type": "transcription",
            "audio": {
                "input": {
                    "format": pcm if self.format_type == "audio/pcm" else {"type": self.format_type},
                    "transcription": {
                        "model": self.model,
                        "language": self.language,
                        "prompt": self.prompt,
                        "keywords": list(self.keywords),
                        "delay": self.delay,
                    },
                    "noise_reduction": None,
                    "turn_detection": self.turn_detection and self.turn_detection.plain(),
                }
            },
            "include": list(self.include) or None,
        }


def updated(session: TranscriptionSession, patch: Any, house: House) -> TranscriptionSession:
    """``session`` with the fields that ``patch``, a decoded ``session`` object, has. Unknown fields change nothing.

    Raises:
        BadValueError: naming the field and what is accepted.
    """
    body = _object(patch, "session")
    if body.get("type", "transcription") != "transcription":
        raise BadValueError("session.type", f"session.type is {body['type']!r}; only 'transcription' is served here")
    given = _object(_object(body.get("audio", {}), "session.audio").get("input", {}), "session.audio.input")
    path = "session.audio.input"
    if given.get("format") is not None:
        session = _with_format(session, given["format"], f"{path}.format")
    if "transcription" in given:
        session = _with_transcription(session, given["transcription"], house, f"{path}.transcription")
    if "turn_detection" in given:
        turns = turn_detection_of(given["turn_detection"], f"{path}.turn_detection")
        session = replace(session, turn_detection=turns)
    if "include" in body:
        session = replace(session, include=_included(body["include"], session, house))
    _check_options(session, house, f"{path}.transcription")
    is_semantic = session.turn_detection is not None and session.turn_detection.patience is not None
    if is_semantic and not house.has_turn_model and not _punctuates(session.model, house):
        raise BadValueError(
            f"{path}.turn_detection.type",
            f"{session.model} writes no punctuation, which semantic_vad goes by where there is no model of turns",
        )
    return session


def _with_format(session: TranscriptionSession, value: Any, path: str) -> TranscriptionSession:
    given = _object(value, path)
    kind = given.get("type", session.format_type)
    if not isinstance(kind, str) or kind not in _ENCODINGS:
        raise BadValueError(f"{path}.type", f"{path}.type is {kind!r}; accepted are {', '.join(_ENCODINGS)}")
    if kind != "audio/pcm":
        if given.get("rate") not in (None, 8_000):
            raise BadValueError(f"{path}.rate", f"{path}.rate is {given['rate']!r}; {kind} has 8000 Hz")
        return replace(session, format_type=kind, rate_hz=8_000)
    rate = given.get("rate", session.rate_hz if session.format_type == kind else 24_000)
    if type(rate) is not int or rate not in PCM_RATES_HZ:
        low, high = PCM_RATES_HZ[0], PCM_RATES_HZ[-1]
        raise BadValueError(f"{path}.rate", f"{path}.rate is {rate!r}; accepted are {low}..{high} Hz")
    return replace(session, format_type=kind, rate_hz=rate)


def _with_transcription(session: TranscriptionSession, value: Any, house: House, path: str) -> TranscriptionSession:
    if value is None:
        return replace(session, language=None, prompt="", keywords=(), delay=None)
    given = _object(value, path)
    if given.get("model") is not None:
        session = replace(session, model=_model(given["model"], house, f"{path}.model"))
    if "languages" in given or "language" in given:
        session = replace(session, language=_language(given, path))
    if "prompt" in given:
        prompt = _text(given["prompt"] or "", MAX_PROMPT_CHARACTERS, f"{path}.prompt")
        session = replace(session, prompt=prompt)
    if "keywords" in given:
        session = replace(session, keywords=_keywords(given["keywords"] or [], f"{path}.keywords"))
    if "delay" in given:
        delay = given["delay"]
        if delay is not None and not (isinstance(delay, str) and delay in PARTIAL_INTERVAL_MS):
            known = ", ".join(PARTIAL_INTERVAL_MS)
            raise BadValueError(f"{path}.delay", f"{path}.delay is {delay!r}; accepted are {known} and null")
        session = replace(session, delay=delay)
    return session


def _model(value: Any, house: House, path: str) -> str:
    name = house.model_named(value, foreign=HOSTED_MODELS) if isinstance(value, str) else None
    if name is None:
        known = ", ".join(house.cards)
        raise BadValueError(path, f"no model {value!r} here; there are {known}", code="model_not_found")
    return name


def _language(given: Mapping[str, Any], path: str) -> str | None:
    name = "language" if given.get("language") is not None else "languages"
    value = given.get(name)
    return language_of([value] if isinstance(value, str) else (value or []), f"{path}.{name}")


def language_of(choices: Any, path: str) -> str | None:
    """One language, without its region. Of several named as hints none is chosen: the model detects.

    Raises:
        BadValueError: for anything but a list of codes.
    """
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise BadValueError(path, f"{path} is {choices!r}; an ISO 639-1 code is needed, en say")
    return choices[0].partition("-")[0].lower() or None if len(choices) == 1 else None


def _keywords(value: Any, path: str) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_KEYWORDS:
        raise BadValueError(path, f"{path} takes a list of at most {MAX_KEYWORDS} terms")
    words = [_text(item, MAX_KEYWORD_CHARACTERS, f"{path}[{index}]") for index, item in enumerate(value)]
    return tuple(word for word in words if word)


def _text(value: Any, max_characters: int, path: str) -> str:
    if not isinstance(value, str) or len(value) > max_characters:
        raise BadValueError(path, f"{path} takes text of at most {max_characters} characters")
    return value


def turn_detection_of(value: Any, path: str) -> TurnDetection | None:
    """The turns that a ``turn_detection`` object asks for, ``None`` for null.

    Raises:
        BadValueError: for an unknown kind or eagerness, or what is no number.
    """
    if value is None:
        return None
    given = _object(value, path)
    kind = given.get("type", "server_vad")
    if kind == "semantic_vad":
        return _semantic(given.get("eagerness"), path)
    if kind != "server_vad":
        raise BadValueError(
            f"{path}.type",
            f"{path}.type is {kind!r}; accepted are 'server_vad', 'semantic_vad', and null for a client that commits",
        )
    default = TurnDetection()
    threshold = _number(given, "threshold", default.threshold, path)
    prefix_ms = _number(given, "prefix_padding_ms", default.prefix_padding_ms, path)
    silence_ms = _number(given, "silence_duration_ms", default.silence_duration_ms, path)
    return TurnDetection(
        threshold=min(max(threshold, MIN_THRESHOLD), MAX_THRESHOLD),
        prefix_padding_ms=round(min(max(prefix_ms, 0), MAX_PREFIX_MS)),
        silence_duration_ms=round(min(max(silence_ms, MIN_SILENCE_MS), MAX_SILENCE_MS)),
    )


def _semantic(eagerness: Any, path: str) -> TurnDetection:
    name = "medium" if eagerness in (None, "auto") else eagerness
    if not isinstance(name, str) or name not in EAGERNESS:
        known = ", ".join(EAGERNESS)
        raise BadValueError(f"{path}.eagerness", f"{path}.eagerness is {eagerness!r}; accepted are auto, {known}")
    return TurnDetection(silence_duration_ms=EAGERNESS[name].longest_ms, eagerness=name)


def _punctuates(model: str, house: House) -> bool:
    return Capability.PUNCTUATION in house.cards[model].capabilities


def _number(given: Mapping[str, Any], name: str, default: float, path: str) -> float:
    value = given.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:  # nor is NaN
        raise BadValueError(f"{path}.{name}", f"{path}.{name} is {brief(repr(value))}; a number is needed")
    return float(value)


def _included(value: Any, session: TranscriptionSession, house: House) -> tuple[str, ...]:
    """What is asked for and can be given; the rest is missing from the effective session."""
    if not isinstance(value, list | None):
        raise BadValueError("session.include", "session.include takes a list")
    offered = {WARNINGS}
    if Capability.CONFIDENCE in house.cards[session.model].capabilities:
        offered.add(LOGPROBS)
    return tuple(item for item in value or () if isinstance(item, str) and item in offered)


def _check_options(session: TranscriptionSession, house: House, path: str) -> None:
    card = house.cards[session.model]
    for name, options in (
        ("language", DecodeOptions(language=session.language)),
        ("prompt", DecodeOptions(context=session.prompt)),
        ("keywords", DecodeOptions(vocabulary=session.keywords)),
    ):
        try:
            card.check(options)
        except UnsupportedOptionError as error:
            raise BadValueError(f"{path}.{name}", str(error)) from error


def _object(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise BadValueError(path, f"{path} is {value!r}; an object is needed")
    return value
