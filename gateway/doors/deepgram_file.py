"""The door of Deepgram's POST /v1/listen: a recording in, its transcript out as one JSON object.

Knows the body of the answer. Shares the query and the shape of words with the live door; the recording's audio comes as
frames of 32-bit floats at 16 kHz, with ``multichannel`` all channels interleaved, and ends with an empty one.
"""

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from gateway.doors.deepgram import alternative, headers_of, key_of, model_uuid, refusal, request_id_of
from gateway.doors.deepgram_options import ListenOptions, hello_of, listen_options
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
)
from gateway.effects import Close, Said
from gateway.errors import GatewayError
from gateway.messages import Audio, AudioSpec, Bye, Error, Farewell, Final
from gateway.pcm import MAX_CHANNELS
from vad.audio import SAMPLE_RATE_HZ

__all__ = ["NAME", "RESUMES", "key_of", "open_door", "refusal"]

NAME = "deepgram_file"
RESUMES = False
PARTIAL_INTERVAL_MS = 10_000  # a recording has no use for partials
_STATUS = {"server_full": 503, "shutting_down": 503}


class RecordingDoor:
    """One request."""

    next_wake_s = None

    def __init__(self, knock: Knock, options: ListenOptions, n_tracks: int) -> None:
        self._knock = knock
        self._options = options
        self._finals: list[list[Final]] = [[] for _ in range(n_tracks)]  # of each channel that is heard by itself
        self._n_over = 0
        self._failure: str | None = None
        self._sha256 = hashlib.sha256()

    def opened(self, now_s: float) -> list[DoorEffect]:
        """A session for each channel."""
        n_tracks = len(self._finals)
        effects: list[DoorEffect] = []
        for track in range(n_tracks):
            spec = AudioSpec("f32le", SAMPLE_RATE_HZ, n_tracks, track if n_tracks > 1 else None)
            hello = msgspec.structs.replace(hello_of(self._options, spec), partial_interval_ms=PARTIAL_INTERVAL_MS)
            effects += [Open(track), Tell(track, hello)]
        return effects

    def receive(self, frame: Frame, now_s: float) -> list[DoorEffect]:
        """Audio; an empty frame is its end."""
        assert isinstance(frame, bytes), "the audio of a request is bytes"
        self._sha256.update(frame)
        return [Tell(track, Audio(frame) if frame else Bye()) for track in range(len(self._finals))]

    def heard(self, track: int, said: Said, now_s: float) -> Sequence[DoorEffect]:
        """Collect the finals; answer behind the last."""
        match said:
            case Final():
                self._finals[track].append(said)
            case Error():
                self._failure = said.message
            case Farewell():
                self._n_over += 1
                if self._n_over < len(self._finals):
                    return []
                if self._failure is not None:
                    return self._error(500, "decode_failed", self._failure)
                return [Say(msgspec.json.encode(self._body(said.audio_s)).decode()), Close(200, "done")]
            case _:
                pass
        return []

    def wake(self, now_s: float) -> list[DoorEffect]:
        """Never asked for."""
        return []

    def peer_gone(self, now_s: float) -> list[DoorEffect]:
        """Nobody waits for the answer."""
        return [Drop(track) for track in range(len(self._finals))]

    def failed(self, error: GatewayError) -> list[LastWords]:
        """An error body."""
        return self._error(_STATUS.get(error.code, 500), error.code, str(error))

    def _error(self, status: int, code: str, message: str) -> list[LastWords]:
        body = {"err_code": code, "err_msg": message, "request_id": request_id_of(self._knock)}
        return [Say(msgspec.json.encode(body).decode()), Close(status, code)]

    def _body(self, audio_s: float) -> dict[str, Any]:
        model, model_id = self._options.model, model_uuid(self._options.model)
        results: dict[str, Any] = {"channels": [self._channel(finals, audio_s) for finals in self._finals]}
        if self._is_asked("utterances"):
            spoken = [(final, channel) for channel, finals in enumerate(self._finals) for final in finals]
            spoken.sort(key=lambda pair: pair[0].start_s)
            results["utterances"] = [
                self._utterance(number, final, channel) for number, (final, channel) in enumerate(spoken)
            ]
        metadata = {
            "request_id": request_id_of(self._knock),
            "sha256": self._sha256.hexdigest(),
            "created": datetime.fromtimestamp(self._knock.at_unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z"),
            "duration": round(audio_s, 3),
            "channels": len(self._finals),
            "models": [model_id],
            "model_info": {model_id: {"name": model, "version": "1", "arch": model}},
        }
        return {"metadata": metadata, "results": results}

    def _channel(self, finals: Sequence[Final], audio_s: float) -> dict[str, Any]:
        languages = [final.language for final in finals if final.language]
        language = max(languages, key=languages.count) if languages else None
        words = [word for final in finals for word in final.words]
        best = alternative(words, self._options, language, (0.0, audio_s))
        if self._is_asked("paragraphs"):
            best["paragraphs"] = self._paragraphs(finals)
        channel: dict[str, Any] = {"alternatives": [best]}
        if language is not None:
            channel["detected_language"] = language
        return channel

    def _is_asked(self, name: str) -> bool:
        return (self._knock.param(name) or "").lower() == "true"

    def _utterance(self, number: int, final: Final, channel: int) -> dict[str, Any]:
        span_s = (final.start_s, final.end_s)
        return {
            "id": f"{request_id_of(self._knock)}-{number}",
            "start": final.start_s,
            "end": final.end_s,
            "channel": channel,
            **alternative(final.words, self._options, final.language, span_s),
        }

    def _paragraphs(self, finals: Sequence[Final]) -> dict[str, Any]:
        """One for each stretch of speech between pauses."""
        found: list[dict[str, Any]] = []
        texts: list[str] = []
        for final in finals:
            span_s = (final.start_s, final.end_s)
            texts.append(alternative(final.words, self._options, final.language, span_s)["transcript"])
            span = {"start": final.start_s, "end": final.end_s}
            found.append({"sentences": [{"text": texts[-1], **span}], "num_words": len(final.words), **span})
        return {"transcript": "\n\n".join(texts), "paragraphs": found}


def open_door(knock: Knock, house: House) -> Admission:
    """A door for one recording."""
    options = listen_options(knock, house)
    is_multichannel = (knock.param("multichannel") or "").lower() in ("true", "1") and knock.n_channels > 1
    if is_multichannel and knock.n_channels > MAX_CHANNELS:
        said = f"the recording has {knock.n_channels} channels; {MAX_CHANNELS} are transcribed at most"
        raise AdmissionError(400, "Bad Request", said, param="multichannel")
    headers = {"Content-Type": "application/json", **headers_of(knock, options)}
    door = RecordingDoor(knock, options, knock.n_channels if is_multichannel else 1)
    return Admission(door, headers=headers, takes_channels=is_multichannel)
