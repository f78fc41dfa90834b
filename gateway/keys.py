"""API keys: who may come in, and whether the server may listen where others can reach it.

Keys come from one environment variable or a file, never from a flag or the printed configuration; only their digests
are kept, compared in constant time. Knows no protocol: where a client shows its key is its door's business.
"""

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from gateway.config import API_KEYS_VARIABLE, ConfigError, ServerConfig


class Keys:
    """The keys that are accepted; none at all means that everybody is."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = tuple(_digest(key) for key in keys)

    def __bool__(self) -> bool:
        """Whether keys are asked for."""
        return bool(self._digests)

    def admit(self, key: str | None) -> bool:
        """Whether ``key`` opens the door. Takes the same time for every key of a length."""
        if not self._digests:
            return True
        shown = _digest(key or "")
        matches = [hmac.compare_digest(shown, digest) for digest in self._digests]
        return any(matches)


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
    if keys or server.allow_anonymous or _is_loopback(server.host):
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
