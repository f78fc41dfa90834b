"""The door of Deepgram's POST /v1/listen: a recording in, its transcript out as one JSON object.

Knows the body of the answer. Shares the query and the shape of words with the live door; the recording's audio comes as
frames of 32-bit floats at 16 kHz and ends with an empty one.
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
from vad.audio import SAMPLE_RATE_HZ

__all__ = ["NAME", "RESUMES", "key_of", "open_door", "refusal"]

NAME = "deepgram_file"
RESUMES = False
PARTIAL_INTERVAL_MS = 10_000  # a recording has no use for partials
_TRACK = 0
_STATUS = {"server_full": 503, "shutting_down": 503}


class RecordingDoor:
    """One request."""

    next_wake_s = None

    def __init__(self, knock: Knock, options: ListenOptions) -> None:
        self._knock = knock
        self._options = options
        self._finals: list[Final] = []
        self._failure: str | None = None
        self._sha256 = hashlib.sha256()

    def opened(self, now_s: float) -> list[DoorEffect]:
        """A session for the recording."""
        hello = hello_of(self._options, AudioSpec("f32le", SAMPLE_RATE_HZ))
        hello = msgspec.structs.replace(hello, partial_interval_ms=PARTIAL_INTERVAL_MS)
        return [Open(_TRACK), Tell(_TRACK, hello)]

    def receive(self, frame: Frame, now_s: float) -> list[DoorEffect]:
        """Audio; an empty frame is its end."""
        assert isinstance(frame, bytes), "the audio of a request is bytes"
        self._sha256.update(frame)
        return [Tell(_TRACK, Audio(frame) if frame else Bye())]

    def heard(self, track: int, said: Said, now_s: float) -> Sequence[DoorEffect]:
        """Collect the finals; answer behind the last."""
        match said:
            case Final():
                self._finals.append(said)
            case Error():
                self._failure = said.message
            case Farewell() if self._failure is not None:
                return self._error(500, "decode_failed", self._failure)
            case Farewell():
                return [Say(msgspec.json.encode(self._body(said.audio_s)).decode()), Close(200, "done")]
            case _:
                pass
        return []

    def wake(self, now_s: float) -> list[DoorEffect]:
        """Never asked for."""
        return []

    def peer_gone(self, now_s: float) -> list[DoorEffect]:
        """Nobody waits for the answer."""
        return [Drop(_TRACK)]

    def failed(self, error: GatewayError) -> list[LastWords]:
        """An error body."""
        return self._error(_STATUS.get(error.code, 500), error.code, str(error))

    def _error(self, status: int, code: str, message: str) -> list[LastWords]:
        body = {"err_code": code, "err_msg": message, "request_id": request_id_of(self._knock)}
        return [Say(msgspec.json.encode(body).decode()), Close(status, code)]

    def _body(self, audio_s: float) -> dict[str, Any]:
        model, model_id = self._options.model, model_uuid(self._options.model)
        languages = [final.language for final in self._finals if final.language]
        language = max(languages, key=languages.count) if languages else None
        words = [word for final in self._finals for word in final.words]
        best = alternative(words, self._options, language, (0.0, audio_s))
        if self._is_asked("paragraphs"):
            best["paragraphs"] = self._paragraphs()
        channel: dict[str, Any] = {"alternatives": [best]}
        if language is not None:
            channel["detected_language"] = language
        results: dict[str, Any] = {"channels": [channel]}
        if self._is_asked("utterances"):
            results["utterances"] = [self._utterance(number, final) for number, final in enumerate(self._finals)]
        metadata = {
            "request_id": request_id_of(self._knock),
            "sha256": self._sha256.hexdigest(),
            "created": datetime.fromtimestamp(self._knock.at_unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z"),
            "duration": round(audio_s, 3),
            "channels": 1,
            "models": [model_id],
            "model_info": {model_id: {"name": model, "version": "1", "arch": model}},
        }
        return {"metadata": metadata, "results": results}

    def _is_asked(self, name: str) -> bool:
        return (self._knock.param(name) or "").lower() == "true"

    def _utterance(self, number: int, final: Final) -> dict[str, Any]:
        span_s = (final.start_s, final.end_s)
        return {
            "id": f"{request_id_of(self._knock)}-{number}",
            "start": final.start_s,
            "end": final.end_s,
            "channel": 0,
            **alternative(final.words, self._options, final.language, span_s),
        }

    def _paragraphs(self) -> dict[str, Any]:
        """One for each stretch of speech between pauses."""
        found: list[dict[str, Any]] = []
        texts: list[str] = []
        for final in self._finals:
            span_s = (final.start_s, final.end_s)
            texts.append(alternative(final.words, self._options, final.language, span_s)["transcript"])
            span = {"start": final.start_s, "end": final.end_s}
            found.append({"sentences": [{"text": texts[-1], **span}], "num_words": len(final.words), **span})
        return {"transcript": "\n\n".join(texts), "paragraphs": found}


def open_door(knock: Knock, house: House) -> Admission:
    """A door for one recording."""
    options = listen_options(knock, house)
    headers = {"Content-Type": "application/json", **headers_of(knock, options)}
    return Admission(RecordingDoor(knock, options), headers=headers)
