"""Whisper on a GPU: the reference's tokens from real weights, and bits that depend on nobody beside.

Clips are those of SENSEWAY_CLIPS (benchmarks/clips.py writes them), else the two recordings of the models' cache.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.clips import Clip, known_clips
from benchmarks.parity import Comparison, References, listing, windows
from benchmarks.shapes import TURBO, endless_book, head, random_model
from megakernel.device import find_device
from megakernel.errors import NoDeviceError
from models.devices import MEGAKERNEL
from models.errors import ModelUnavailableError
from models.store import find_model
from models.timeline import Timeline
from models.tokenizer import WhisperTokenizer
from models.whisper.backend import Writing
from models.whisper.decode import Decoded, Request, max_sampled_tokens
from models.whisper.engine import WhisperEngine
from models.whisper.loading import on_device, open_megakernel, read_model
from models.whisper.megakernel_backend import SlotAudio
from models.whisper.reference import DecoderCache, Whisper
from models.whisper.vocabulary import rule_book
from streaming.engine import Chunk, DecodeOptions
from streaming.transcript import text_of
from vad.audio import SAMPLE_RATE_HZ, SpeechSpan

pytestmark = pytest.mark.gpu

MODELS = ("whisper-tiny.en", "whisper-base")


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    try:
        find_device()
    except NoDeviceError as error:
        pytest.skip(f"no GPU: {error}")


@pytest.fixture(scope="module")
def clips() -> list[Clip]:
    try:
        return known_clips()
    except ModelUnavailableError as error:
        pytest.skip(str(error))


class Checkpoint:
    """Real weights, and the backend that has them on the GPU."""

    def __init__(self, name: str) -> None:
        self.files = find_model(name, fetch_missing=False)
        self.tokenizer = WhisperTokenizer.load(self.files.tokenizer)
        model = read_model(self.files)
        self.rules = rule_book(self.tokenizer, model.config.n_vocab)
        self.backend = open_megakernel(lambda: read_model(self.files), self.rules, Timeline())
        self.references = References.of(model, self.rules, "cuda")

    def request(self, n_samples: int) -> Request:
        """English text without timestamps."""
        special = self.rules.special
        task = (special.languages[0], special.transcribe) if special.languages else ()
        head = (special.start_of_transcript, *task, special.no_timestamps)
        return Request(head, 0, (), (), max_sampled_tokens(n_samples))


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest) -> Iterator[Checkpoint]:
    try:
        one = Checkpoint(request.param)
    except ModelUnavailableError as error:
        pytest.skip(str(error))
    yield one
    one.backend.close()


def test_every_clip_has_the_references_tokens_but_for_rounding(
    checkpoint: Checkpoint, clips: list[Clip], capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = Comparison(checkpoint.references, checkpoint.backend)
    compared = [one for clip in windows(clips) if (one := comparison.compare(*clip)) is not None]
    differences = [one.difference for one in compared if one.difference is not None]
    with capsys.disabled():
        sys.stdout.write(f"\n{len(compared)} windows\n{listing(differences, checkpoint.tokenizer)}\n")
    assert compared
    assert [one for one in differences if not one.is_rounding] == []


def assert_same_bits(one: Decoded, other: Decoded) -> None:
    assert one.tokens == other.tokens
    assert one.logprobs == other.logprobs
    assert one.no_speech_probability == other.no_speech_probability
    assert torch.equal(one.attention, other.attention)


def test_a_text_has_the_same_bits_again_beside_others_and_with_any_draft(
    checkpoint: Checkpoint, clips: list[Clip]
) -> None:
    backend, rules = checkpoint.backend, checkpoint.rules.plain
    parts = [samples for _, samples in windows(clips)][: backend.max_windows]
    audios = [audio for samples in parts if (audio := backend.listen([samples])[0]) is not None]  # one at a time
    writings = [
        Writing(audio, checkpoint.request(len(samples)), rules) for audio, samples in zip(audios, parts, strict=False)
    ]
    alone = [backend.write([writing])[0] for writing in writings]
    for one, other in zip(alone, backend.write(writings), strict=True):
        assert_same_bits(one, other)
    for writing, one in zip(writings, alone, strict=True):
        for draft in (one.tokens, (*one.tokens[:5], 11, 12, *one.tokens[6:]), (11,) * 40):
            drafted = replace(writing, request=replace(writing.request, draft=draft))
            assert_same_bits(backend.write([drafted])[0], one)
    right = replace(writings[0], request=replace(writings[0].request, draft=alone[0].tokens))
    assert backend.write([right])[0].n_verified >= len(alone[0].tokens) - 1
    backend.forget(audios)


def test_temperatures_give_the_same_text_each_time(checkpoint: Checkpoint, clips: list[Clip]) -> None:
    backend = checkpoint.backend
    (audio,) = backend.listen([clips[0].samples[: 5 * SAMPLE_RATE_HZ]])
    assert audio is not None
    plain = Writing(audio, checkpoint.request(5 * SAMPLE_RATE_HZ), checkpoint.rules.plain)
    warm = [backend.write([replace(plain, temperature=1.0)])[0] for _ in range(2)]
    assert_same_bits(*warm)
    assert warm[0].tokens != backend.write([plain])[0].tokens
    backend.forget([audio])


def test_the_engine_is_on_the_megakernel_and_hears_the_same_in_a_batch(
    checkpoint: Checkpoint, clips: list[Clip]
) -> None:
    engine = WhisperEngine.load(checkpoint.files, name=checkpoint.files.name)
    assert (engine.backend, engine.why) == (MEGAKERNEL, "the fastest there is")
    batch = [
        (engine.open(DecodeOptions()), Chunk(SpeechSpan(0, n), clip.samples[:n], is_final=True))
        for clip in clips[:2]
        for n in (3 * SAMPLE_RATE_HZ, min(len(clip.samples), 9 * SAMPLE_RATE_HZ))
    ]
    together = engine.decode(batch)
    again = [engine.decode([pair])[0] for pair in batch]
    assert [text_of(one.words) for one in together] == [text_of(one.words) for one in again]
    assert all(one.words for one in together)


def test_turbos_logits_are_nearer_to_float32_than_those_of_torch_in_bfloat16(tmp_path: Path) -> None:
    rules = endless_book()
    backend = on_device(random_model(), rules, Timeline(), cache=tmp_path)
    rng = np.random.default_rng(0)
    (audio,) = backend.listen([rng.normal(scale=0.1, size=30 * SAMPLE_RATE_HZ).astype(np.float32)])
    assert isinstance(audio, SlotAudio)
    (found,) = backend.write([Writing(audio, Request(head(), 0, (), (), 100), rules.plain)])
    exact, rounded = random_model(), random_model().to(torch.bfloat16)
    crossed = backend.listener.stage.cross_cache[audio.slot]  # a full window: nothing of the silence is in it
    wanted, theirs = (_logprobs(model, crossed, found.tokens) for model in (exact, rounded))
    ours = torch.tensor(found.logprobs)
    error, their_error = (float((each - wanted).square().mean().sqrt()) for each in (ours, theirs))
    assert error <= their_error, f"{error} against {their_error}"
    backend.close()


@torch.inference_mode()
def _logprobs(model: Whisper, crossed: torch.Tensor, tokens: tuple[int, ...]) -> torch.Tensor:
    """What ``model`` gives each token behind those before, over the same keys and values [layer, 2, H, n, D]."""
    weight = model.decoder.embed_tokens.weight
    keys, values = ([layer[which][None].to(weight) for layer in crossed] for which in (0, 1))
    room = (1, TURBO.n_heads, TURBO.n_text_positions, 64)
    own = [[weight.new_empty(room) for _ in keys] for _ in range(2)]
    cache = DecoderCache(keys, values, *own)
    hidden = model.decoder(torch.tensor([[*head(), *tokens[:-1]]], device="cuda"), cache)
    logits = model.logits(hidden[:, len(head()) - 1 :])[0].cpu() + endless_book().plain.suppressed
    chosen = torch.tensor(tokens)[:, None]
    return logits.log_softmax(-1).gather(1, chosen)[:, 0]
