"""What the OpenAI-compatible endpoints share: where the key is, how errors look, words as log-probabilities. Pure."""

import math
from collections.abc import Iterable
from typing import Any

from gateway.doors.door import AdmissionError, Knock, Refusal
from gateway.messages import WordItem

KEY_SUBPROTOCOL = "openai-insecure-api-key."


def key_of(knock: Knock) -> str | None:
    """``Authorization: Bearer KEY``, or a browser's sub-protocol ``openai-insecure-api-key.KEY``."""
    scheme, _, key = knock.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    offered = (name.removeprefix(KEY_SUBPROTOCOL) for name in knock.subprotocols if name.startswith(KEY_SUBPROTOCOL))
    return next(offered, None)


def refusal(error: AdmissionError, knock: Knock) -> Refusal:
    """The error body of every endpoint."""
    return Refusal(error_body(error.status, error.code, str(error), error.param))


def error_body(status: int, code: str, message: str, param: str | None = None) -> dict[str, Any]:
    """An error as an answer to a request."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def logprobs(words: Iterable[WordItem]) -> list[dict[str, Any]]:
    """Words in the shape of tokens; the model's own tokens are not told apart."""
    return [
        {
            "token": word.text,
            "logprob": None if word.confidence is None else round(math.log(max(word.confidence, 1e-6)), 4),
            "bytes": list(word.text.encode()),
        }
        for word in words
    ]
