"""What a deployment may choose: one TOML file, with environment and flags over it, as nested frozen dataclasses.

Knows which keys exist, their units and ranges, and where a wrong value came from. Does not know what the settings do.
Everything but ``load`` is pure.
"""

import dataclasses
import os
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gateway.messages import DEFAULT_HANGOVER_MS, DEFAULT_PARTIAL_INTERVAL_MS, MAX_CHUNK_MS, MIN_CHUNK_MS
from streaming.capability import Capability
from streaming.utterance import CommitPolicy
from vad.gate import GateSettings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ENVIRONMENT_PREFIX = "SENSEWAY_"
CONFIG_PATH_VARIABLE = "SENSEWAY_CONFIG"
API_KEYS_VARIABLE = "SENSEWAY_API_KEYS"  # read by `keys`: what is printed and may stand in a file holds no secrets
TWILIO_TOKEN_VARIABLE = "SENSEWAY_TWILIO_AUTH_TOKEN"  # Twilio's streams must be signed with it
API_KEY_VARIABLE = "SENSEWAY_API_KEY"  # read by `senseway stream`: the key that a client shows
CACHE_VARIABLE = "SENSEWAY_CACHE"  # read where files are fetched: a place on this machine, not a matter of deployment

_OTHER_VARIABLES = (CONFIG_PATH_VARIABLE, CACHE_VARIABLE, API_KEYS_VARIABLE, API_KEY_VARIABLE, TWILIO_TOKEN_VARIABLE)

# Any: a TOML value, the text of a variable or a parsed flag; `_coerce` gives it the field's type or refuses it.
Settings = Mapping[str, Any]


_Table = TypeVar("_Table", bound="DataclassInstance")


class ConfigError(Exception):
    """A setting that can't be taken: the message names its source, the key and what is accepted."""


def _check_range(name: str, value: float, low: float, high: float, unit: str = "") -> None:
    if not low <= value <= high:  # also true for NaN
        raise ValueError(f"{name} is {value}; it must lie in {low}..{high}{unit}")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where the server listens and how much it takes on."""

    host: str = "127.0.0.1"
    port: int = 8300  # 0..65535; 0 lets the system choose
    workers: int = 1  # 1..64; processes with sockets and sessions before one with the models; 1: all is one process
    max_sessions: int = 64  # 1..10000, of all workers; one more is refused with `server_full`
    max_messages_per_s: int = 1_000  # 10..100000; of one client; who sends more is read from later
    max_upload_mb: int = 100  # 1..4096; MiB of a request with a recording
    idle_timeout_s: float = 600.0  # 1..86400; a client that sends nothing for so long is let go
    api_keys_file: str = ""  # one key a line; SENSEWAY_API_KEYS holds some too. Without any, everybody is let in
    strict_options: bool = False  # refuse options without effect here, instead of naming them in a header
    calls_file: str = ""  # gets what is final of every telephone call, one JSON object a line
    audiosocket_port: int = 0  # 0..65535; TCP, for Asterisk's AudioSocket, without keys; 0: none
    allow_anonymous: bool = False  # listen where others can reach it, without keys
    allowed_origins: tuple[str, ...] = ()  # of web pages elsewhere that may connect, https://app.example say; *: all

    def __post_init__(self) -> None:
        """Raises ``ValueError`` that names setting, value and range."""
        _check_range("port", self.port, 0, 65_535)
        _check_range("audiosocket_port", self.audiosocket_port, 0, 65_535)
        _check_range("workers", self.workers, 1, 64)
        _check_range("max_sessions", self.max_sessions, 1, 10_000)
        _check_range("max_messages_per_s", self.max_messages_per_s, 10, 100_000)
        _check_range("max_upload_mb", self.max_upload_mb, 1, 4_096, " MiB")
        _check_range("idle_timeout_s", self.idle_timeout_s, 1, 86_400, " s")
        if not self.host:
            raise ValueError("host is empty; an address to listen on is needed, 127.0.0.1 or 0.0.0.0 say")


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """What a session gets unless its `hello` says otherwise, and its bounds."""

    partial_interval_ms: int = DEFAULT_PARTIAL_INTERVAL_MS  # 100..10000; least time between partials
    max_unacked_s: float = 10.0  # 1..120; audio a client may have sent that is not yet acknowledged
    resume_window_s: float = 60.0  # 0..3600; how long a lost session waits for its client
    commit_policy: CommitPolicy = CommitPolicy.AGREEMENT  # when words of a partial are settled
    # Of models that decode in chunks; others take no notice.
    chunk_ms: int = 0  # 160..2000, whole frames of the model; 0: what the model recommends
    left_context_ms: int = 0  # 80..30000, whole frames; heard again before a chunk, less is quicker; 0: recommended
    second_pass: bool = False  # finals are decoded once more in one piece, and nothing is settled before

    def __post_init__(self) -> None:
        """Raises ``ValueError`` that names setting, value, unit and range."""
        _check_range("partial_interval_ms", self.partial_interval_ms, 100, 10_000, " ms")
        _check_range("max_unacked_s", self.max_unacked_s, 1, 120, " s")
        _check_range("resume_window_s", self.resume_window_s, 0, 3_600, " s")
        if self.chunk_ms:
            _check_range("chunk_ms", self.chunk_ms, MIN_CHUNK_MS, MAX_CHUNK_MS, " ms, or 0")
        if self.left_context_ms:
            _check_range("left_context_ms", self.left_context_ms, 80, 30_000, " ms, or 0")


class TurnModel(StrEnum):
    """What judges whether a speaker who pauses is done, for clients that ask."""

    AUTO = "auto"  # the model, or, where it can't be had, punctuation and silence
    SMART_TURN = "smart-turn"
    NONE = "none"  # punctuation and silence


@dataclass(frozen=True, slots=True)
class Config:
    """One deployment."""

    models: tuple[str, ...] = ("whisper-tiny.en",)  # what is served; the first is the default of `hello`
    required_capabilities: tuple[Capability, ...] = ()  # the start fails if a model lacks one
    model_aliases: tuple[str, ...] = ()  # NAME=MODEL: a name that clients of other services send, and what it means
    turn_model: TurnModel = TurnModel.AUTO  # auto, smart-turn, none
    n_threads: int = 0  # 0..1024; CPU threads that encode (decoding has one); 0: as many as this process may use
    server: ServerConfig = field(default_factory=ServerConfig)
    session: SessionConfig = field(default_factory=SessionConfig)
    vad: GateSettings = field(default_factory=lambda: GateSettings(hangover_ms=DEFAULT_HANGOVER_MS))

    def __post_init__(self) -> None:
        """Raises ``ValueError`` that names setting, value and range."""
        _check_range("n_threads", self.n_threads, 0, 1024)
        if not self.models:
            raise ValueError("models is empty; name at least one, whisper-tiny.en say")
        if len(set(self.models)) < len(self.models):
            raise ValueError(f"models names one twice: {', '.join(self.models)}")
        for alias in self.model_aliases:
            if alias.partition("=")[2] not in self.models:
                raise ValueError(
                    f"model_aliases has {alias!r}; NAME=MODEL is needed, with one of {', '.join(self.models)}"
                )


def load(flags: Settings, *, environ: Mapping[str, str] = os.environ, path: Path | None = None) -> Config:
    """The effective configuration: ``flags`` over ``environ`` over the file.

    ``flags`` has dotted keys (``server.port``); a flag that was not given is absent. The file is ``path``, or the one
    that ``SENSEWAY_CONFIG`` names, or none.

    Raises:
        ConfigError: for an unreadable file, an unknown key, or a value of the wrong type or range.
    """
    if path is None and environ.get(CONFIG_PATH_VARIABLE):
        path = Path(environ[CONFIG_PATH_VARIABLE])
    from_file = {} if path is None else read_toml(path)
    return merge(
        {
            f"file {path}": from_file,
            "environment": from_environment(environ),
            "command line": flags,
        }
    )


def read_toml(path: Path) -> dict[str, Any]:
    """The settings of a TOML file, with dotted keys.

    Raises:
        ConfigError: if there is no such file or it is not TOML.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"file {path} is not TOML: {error}") from error
    return _dotted(tables)


def from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings among the variables: ``SENSEWAY_SERVER_PORT`` is ``server.port``.

    Raises:
        ConfigError: for a variable with our prefix that is no setting.
    """
    keys_by_variable = {variable_of(key): key for key in known_keys()}
    found = {}
    for variable, value in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in _OTHER_VARIABLES:
            continue
        if variable not in keys_by_variable:
            known = ", ".join([*_OTHER_VARIABLES, *keys_by_variable])
            raise ConfigError(f"environment: unknown variable {variable}; known are {known}")
        found[keys_by_variable[variable]] = value
    return found


def variable_of(key: str) -> str:
    """The environment variable of a dotted key."""
    return ENVIRONMENT_PREFIX + key.upper().replace(".", "_")


def known_keys() -> list[str]:
    """Every dotted key, in the order of the dataclasses."""
    return list(_dotted(dataclasses.asdict(Config())))


def merge(sources: Mapping[str, Settings]) -> Config:
    """The configuration that ``sources`` make, a later one over an earlier; the names of the sources are for messages.

    Raises:
        ConfigError: for an unknown key, or a value of the wrong type or range.
    """
    config = Config()
    for source, settings in sources.items():
        for key in settings:
            if key not in known_keys():
                raise ConfigError(f"{source}: unknown key {key}; known are {', '.join(known_keys())}")
        try:
            config = _replaced(config, settings)
        except ValueError as error:
            raise ConfigError(f"{source}: {error}") from error
    return config


def as_toml(config: Config) -> str:
    """``config`` as a file that ``load`` would read back to the same."""
    values, tables = [], []
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            lines = [f"{name} = {_toml_value(inner)}" for name, inner in dataclasses.asdict(value).items()]
            tables.append("\n".join([f"\n[{item.name}]", *lines]))
        else:
            values.append(f"{item.name} = {_toml_value(value)}")
    return "\n".join(values + tables) + "\n"


def _toml_value(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case tuple():
            return "[" + ", ".join(_toml_value(item) for item in value) + "]"
        case _:
            escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
            return f'"{escaped}"'


def _dotted(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        if isinstance(value, Mapping):
            flat |= _dotted(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _replaced(instance: _Table, settings: Settings, prefix: str = "") -> _Table:
    """``instance`` with ``settings`` in place; each table is checked once, with all of its changes."""
    types_by_name = typing.get_type_hints(type(instance))
    changes: dict[str, Any] = {}
    for item in dataclasses.fields(instance):
        key, value = prefix + item.name, getattr(instance, item.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            changes[item.name] = _replaced(value, settings, f"{key}.")
        elif key in settings:
            changes[item.name] = _coerce(settings[key], types_by_name[item.name], key)
    return dataclasses.replace(instance, **changes)


def _coerce(value: Any, wanted: Any, key: str) -> Any:
    """``value`` as ``wanted``; text is parsed, as environment and flags bring nothing else."""
    if isinstance(wanted, types.GenericAlias):  # tuple[X, ...]
        items = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise ValueError(f"{key} is {value!r}; a list is needed")
        return tuple(_coerce(item, wanted.__args__[0], key) for item in items)
    if wanted is str and isinstance(value, str):
        return value
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is wanted:
        return value
    if isinstance(value, str):
        return _parsed(value, _truth if wanted is bool else wanted, key)
    raise ValueError(f"{key} is {value!r}; {_accepted(wanted)} is needed")


def _parsed(text: str, wanted: Any, key: str) -> Any:
    try:
        return wanted(text)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{key} is {text!r}; {_accepted(wanted)} is needed") from error


def _truth(text: str) -> bool:
    """``bool`` takes any text for true."""
    return {"true": True, "1": True, "false": False, "0": False}[text.lower()]


def _accepted(wanted: Any) -> str:
    if wanted is _truth:
        return "true or false"
    if issubclass(wanted, StrEnum):
        return "one of " + ", ".join(wanted)
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false"}[wanted]
