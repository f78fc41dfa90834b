"""API keys: who may come in, for good or for a while, and whether the server may listen where others can reach it.

Keys come from one environment variable or a file, never from a flag or the printed configuration; only their digests
are kept, compared in constant time. Knows no protocol: where a client shows its key is its door's business.
"""

import base64
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gateway.config import API_KEYS_VARIABLE, ConfigError, ServerConfig

PASS_PREFIX = "ek_"


class Keys:
    """The keys that are accepted; none at all means that everybody is."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = tuple(_digest(key) for key in keys)
        self._seal = secrets.token_bytes(32)  # of passes: they end with this process

    def __bool__(self) -> bool:
        """Whether keys are asked for."""
        return bool(self._digests)

    def admit(self, key: str | None, at_unix_s: float) -> bool:
        """Whether ``key``, a lasting one or a pass, opens the door now."""
        return self.is_lasting(key) or self._is_valid_pass(key or "", at_unix_s)

    def is_lasting(self, key: str | None) -> bool:
        """Whether ``key`` is one of ours. Takes the same time for every key of a length."""
        if not self._digests:
            return True
        shown = _digest(key or "")
        matches = [hmac.compare_digest(shown, digest) for digest in self._digests]
        return any(matches)

    def issue(self, claims: Mapping[str, Any], expires_unix_s: int) -> str:
        """A pass: a key that opens until then, and carries ``claims`` (JSON) for the door to read."""
        body = json.dumps({"expires_at": expires_unix_s, **claims}, separators=(",", ":")).encode()
        return f"{PASS_PREFIX}{_text(body)}.{_text(self._sealed(body))}"

    def _is_valid_pass(self, key: str, at_unix_s: float) -> bool:
        body_text, _, seal_text = key.removeprefix(PASS_PREFIX).partition(".")
        try:
            body, seal = _bytes(body_text), _bytes(seal_text)
        except ValueError:
            return False
        is_ours = key.startswith(PASS_PREFIX) and hmac.compare_digest(seal, self._sealed(body))
        return is_ours and claims_of(key).get("expires_at", 0) > at_unix_s

    def _sealed(self, body: bytes) -> bytes:
        return hmac.digest(self._seal, body, "sha256")


def claims_of(key: str | None) -> dict[str, Any]:
    """What a pass carries; nothing for any other key. Whether it is genuine, ``admit`` says."""
    if key is None or not key.startswith(PASS_PREFIX):
        return {}
    try:
        claims = json.loads(_bytes(key.removeprefix(PASS_PREFIX).partition(".")[0]))
    except ValueError:
        return {}
    return claims if isinstance(claims, dict) else {}


def _text(data: bytes) -> str:
    """Letters that may stand in a header and in the name of a sub-protocol."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def load_keys(server: ServerConfig, *, environ: Mapping[str, str] = os.environ) -> Keys:
    """The keys of the environment and of the file that ``server`` names, one a line, ``#`` before comments.

    Raises:
        ConfigError: if the file can't be read or holds no key.
    """
    keys = [key.strip() for key in environ.get(API_KEYS_VARIABLE, "").split(",") if key.strip()]
    if server.api_keys_file:
        keys += _from_file(Path(server.api_keys_file))
    return Keys(keys)


def _from_file(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"server.api_keys_file {path}: {getattr(error, 'strerror', None) or error}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError(f"server.api_keys_file {path} holds no key; one a line is needed")
    return keys


def exposure_problem(server: ServerConfig, keys: Keys) -> str | None:
    """Why listening at this address would let strangers in, ``None`` if it would not."""
    if server.allow_anonymous or _is_loopback(server.host):
        return None
    if keys and server.audiosocket_port:
        return (
            f"AudioSocket knows no keys, so port {server.audiosocket_port} on {server.host} lets everybody in who can "
            "reach it: keep it on a network of its own and say --allow-anonymous, or leave server.audiosocket_port out"
        )
    if keys:
        return None
    return (
        f"listening on {server.host} lets everybody in who can reach it: set {API_KEYS_VARIABLE} or "
        "server.api_keys_file, or say --allow-anonymous"
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name: who knows where it leads
