"""The query of Deepgram's /v1/listen, and what this server makes of it. Pure.

Knows parameters, their defaults and which can't be honoured: those are refused where they make the audio unreadable or
name what isn't here, else listed as ignored. Does not know messages or audio.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gateway.doors.door import AdmissionError, House, Knock
from gateway.live_audio import LiveAudioError, LiveDecoder, Sniffed, has_codecs, ogg, opus_packets
from gateway.messages import AudioSpec, Hello
from gateway.pcm import AudioFormat
from streaming.capability import Capability
from streaming.engine import DecodeOptions, UnsupportedOptionError
from vad.audio import SAMPLE_RATE_HZ

# Beginnings of the hosted service's model names: who sends them means "whatever transcribes here".
HOSTED_MODELS = ("nova", "enhanced", "base", "whisper", "flux", "general", "2-")
DECODERS: Mapping[str, Callable[[], LiveDecoder]] = {"opus": opus_packets, "ogg-opus": ogg}
ENCODINGS = {"linear16": "s16le", "linear32": "s32le", "mulaw": "mulaw", "alaw": "alaw"}
# A model that hears whole utterances needs more than the protocol's 10 ms to know that one is over.
MIN_ENDPOINTING_MS, MAX_ENDPOINTING_MS = 300, 10_000
MIN_UTTERANCE_END_MS = 1_000
MAX_ENCODED_BYTES = 1 << 16  # decoded at once: some seconds of what browsers record
# Parameters that would change the text or the answer and can't be honoured; neutral values are taken in silence.
WITHOUT_EFFECT = (
    "diarize",
    "diarize_model",
    "numerals",
    "filler_words",
    "profanity_filter",
    "dictation",
    "redact",
    "replace",
    "search",
    "detect_entities",
    "callback",
)
_NEUTRAL = ("false", "False", "0", "")


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """What a client of /v1/listen asks for, as far as it is honoured."""

    model: str
    language: str | None  # None: the model detects
    names_language: bool  # in results, for language=multi
    vocabulary: tuple[str, ...]
    has_interims: bool
    hangover_ms: int
    has_endpoints: bool  # speech_final is said
    utterance_end_s: float | None
    has_vad_events: bool
    is_punctuated: bool
    ignored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LiveAudio:
    """The audio of a live stream; one track for each channel that is heard by itself.

    What a decoder of ours makes of codecs and containers counts as what was declared: floats, mono, 16 kHz.
    """

    encoding: str
    sample_rate_hz: int
    n_channels: int = 1
    is_multichannel: bool = False
    new_decoder: Callable[[], LiveDecoder] | None = None

    @property
    def n_tracks(self) -> int:
        """Transcripts that the stream gives."""
        return self.n_channels if self.is_multichannel else 1

    @property
    def bytes_per_s(self) -> int:
        """All channels together."""
        return AudioFormat(self.encoding, self.sample_rate_hz, self.n_channels).frame_bytes * self.sample_rate_hz

    def spec(self, track: int) -> AudioSpec:
        """The format as the session of a track takes it."""
        return AudioSpec(
            self.encoding, self.sample_rate_hz, self.n_channels, channel=track if self.is_multichannel else None
        )


def listen_options(knock: Knock, house: House) -> ListenOptions:
    """What the query asks for. Raises ``AdmissionError``."""
    name = knock.param("model")
    model = house.default_model if not name else house.model_named(name, foreign=HOSTED_MODELS)
    if model is None:
        raise _refused("model", f"no model {name!r} here; there are {', '.join(house.cards)}")
    card = house.cards[model]
    language = _language(knock.param("language"))
    try:
        card.check(DecodeOptions(language=language))
    except UnsupportedOptionError as error:
        raise _refused("language", str(error)) from error
    ignored = [item for item in WITHOUT_EFFECT if any(value not in _NEUTRAL for value in knock.params(item))]
    vocabulary = (*knock.params("keyterm"), *(item.partition(":")[0] for item in knock.params("keywords")))
    if vocabulary and Capability.VOCABULARY not in card.capabilities:
        ignored.append("keyterm")
        vocabulary = ()
    if ignored and house.is_strict:
        raise _refused(ignored[0], f"without effect on this server: {', '.join(ignored)}")
    if knock.param("utterance_end_ms") and not _flag(knock, "interim_results"):
        raise _refused("utterance_end_ms", "utterance_end_ms needs interim_results=true")
    endpointing = knock.param("endpointing")
    return ListenOptions(
        model=model,
        language=language,
        names_language=knock.param("language") == "multi",
        vocabulary=tuple(term for term in vocabulary if 0 < len(term) <= 100)[:1_000],
        has_interims=_flag(knock, "interim_results"),
        hangover_ms=_hangover_ms(endpointing, house),
        has_endpoints=endpointing not in ("false", "False"),
        utterance_end_s=_utterance_end_s(knock),
        has_vad_events=_flag(knock, "vad_events"),
        is_punctuated=_flag(knock, "punctuate") or _flag(knock, "smart_format"),
        ignored=tuple(ignored),
    )


def live_audio(knock: Knock) -> LiveAudio:
    """The audio of a live stream; without an encoding its first bytes say what it is. Raises ``AdmissionError``."""
    encoding = knock.param("encoding")
    if not encoding or encoding in DECODERS:
        return _decoded_audio(knock, encoding or None)
    if encoding not in ENCODINGS:
        known = ", ".join([*ENCODINGS, *DECODERS])
        raise _refused("encoding", f"encoding is {encoding!r}; accepted are {known}, and none for a container")
    sample_rate_hz = _integer(knock, "sample_rate", None)
    n_channels = _integer(knock, "channels", 1)
    try:
        AudioFormat(ENCODINGS[encoding], sample_rate_hz, n_channels)
    except ValueError as error:
        raise _refused("sample_rate", str(error)) from error
    is_multichannel = _flag(knock, "multichannel") and n_channels > 1
    return LiveAudio(ENCODINGS[encoding], sample_rate_hz, n_channels, is_multichannel)


def raw_format(knock: Knock) -> AudioFormat | None:
    """The format of a recording without a header, where the query gives one. Raises ``AdmissionError``."""
    encoding = ENCODINGS.get(knock.param("encoding") or "")
    if encoding is None or not knock.param("sample_rate"):
        return None
    try:
        return AudioFormat(encoding, _integer(knock, "sample_rate", None), _integer(knock, "channels", 1))
    except ValueError as error:
        raise _refused("sample_rate", str(error)) from error


def _decoded_audio(knock: Knock, encoding: str | None) -> LiveAudio:
    if encoding is not None and not has_codecs():
        raise _refused("encoding", f"encoding {encoding} is not decoded here, where senseway[media] is not installed")
    if _flag(knock, "multichannel"):
        raise _refused("multichannel", f"channels are told apart in {', '.join(ENCODINGS)} only")
    new_decoder = Sniffed if encoding is None else DECODERS[encoding]
    return LiveAudio("f32le", SAMPLE_RATE_HZ, new_decoder=new_decoder)


def hello_of(options: ListenOptions, audio: AudioSpec) -> Hello:
    """The first message of a session that does this."""
    return Hello(
        audio=audio,
        model=options.model,
        language=options.language,
        vocabulary=options.vocabulary,
        hangover_ms=options.hangover_ms,
    )


def _language(value: str | None) -> str | None:
    """``en-US`` is ``en`` to a model; ``multi`` and nothing let it detect."""
    return None if value in (None, "", "multi") else value.partition("-")[0].lower()


def _hangover_ms(endpointing: str | None, house: House) -> int:
    if endpointing in (None, "", "true", "True", "false", "False"):
        return house.gate.hangover_ms
    try:
        asked_ms = int(endpointing)
    except ValueError as error:
        raise _refused("endpointing", f"endpointing is {endpointing!r}; milliseconds or false are needed") from error
    return min(max(asked_ms, MIN_ENDPOINTING_MS), MAX_ENDPOINTING_MS)


def _utterance_end_s(knock: Knock) -> float | None:
    if not knock.param("utterance_end_ms"):
        return None
    asked_ms = _integer(knock, "utterance_end_ms", None)
    if asked_ms < MIN_UTTERANCE_END_MS:
        raise _refused("utterance_end_ms", f"utterance_end_ms is {asked_ms}; at least {MIN_UTTERANCE_END_MS} is needed")
    return asked_ms / 1_000


def _integer(knock: Knock, name: str, default: int | None) -> int:
    text = knock.param(name)
    if not text and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError as error:
        raise _refused(name, f"{name} is {text!r}; a whole number is needed") from error


def _flag(knock: Knock, name: str) -> bool:
    return (knock.param(name) or "").lower() in ("true", "1")


def _refused(param: str, message: str) -> AdmissionError:
    return AdmissionError(400, "Bad Request", message, param=param)


def bare(text: str) -> str:
    """A word as the protocol's ``word`` has it: lower case, without marks at its ends."""
    stripped: Sequence[str] = text.strip().lower().strip(_MARKS)
    return str(stripped)


_MARKS = ".,;:!?…\"'“”‘’«»()[]{}¿¡。、！？؟।-–—"


class AudioIn:
    """A live stream's audio on its way to the sessions: as it came, or decoded."""

    def __init__(self, audio: LiveAudio) -> None:
        self.n_bytes = 0  # given on
        self._audio = audio
        self._decoder = audio.new_decoder() if audio.new_decoder else None

    @property
    def appended_s(self) -> float:
        """How long it is so far."""
        return self.n_bytes / self._audio.bytes_per_s

    def push(self, data: bytes) -> bytes:
        """What ``data`` completes. Raises ``LiveAudioError``."""
        if self._decoder is not None:
            if len(data) > MAX_ENCODED_BYTES:
                raise LiveAudioError(
                    f"a frame of {len(data)} bytes; encoded audio comes in {MAX_ENCODED_BYTES} at most"
                )
            data = self._decoder.push(data).astype("<f4", copy=False).tobytes()
        self.n_bytes += len(data)
        return data

    def flush(self) -> bytes:
        """What still waits for more."""
        data = b"" if self._decoder is None else self._decoder.flush().astype("<f4", copy=False).tobytes()
        self.n_bytes += len(data)
        return data
