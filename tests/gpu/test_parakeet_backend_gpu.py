"""Parakeet's backends on a GPU: what they hear and write, and the graph decoder against the reference."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from numpy.typing import NDArray

from megakernel.device import find_device
from models.backends import Backends, Offer
from models.errors import ModelUnavailableError
from models.parakeet.backend import Backend, TorchBackend
from models.parakeet.config import FRAME_SAMPLES, ParakeetConfig
from models.parakeet.device_backend import megakernel_on_device, torch_on_device
from models.parakeet.engine import ParakeetEngine
from models.parakeet.graph_decoder import GraphDecoder
from models.parakeet.greedy import Emission, TorchDecoder
from models.parakeet.loading import read_model
from models.parakeet.megakernel_backend import decoder_on
from models.parakeet.reference import Parakeet
from models.parakeet.tokens import Pieces
from models.store import find_model, recording
from models.timeline import Timeline
from streaming.engine import Chunk, DecodeOptions
from vad.audio import SpeechSpan

pytestmark = pytest.mark.gpu

CONFIG = ParakeetConfig(128, 2, 1024, 8, 4096, 9, 256, 640, 2, 2049, 2048)  # of 0.6B, with two blocks and fewer tokens


@pytest.fixture(scope="module")
def model() -> Parakeet:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    torch.manual_seed(3)
    model = Parakeet(CONFIG).eval().requires_grad_(False)
    model.joint.head.weight.mul_(4.0)
    model.joint.head.bias[CONFIG.blank_id] += 1.0
    return model


@pytest.fixture(scope="module", params=[megakernel_on_device, torch_on_device], ids=["megakernel", "torch"])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Parakeet) -> Backend:
    cache: Path = tmp_path_factory.mktemp("cubins")
    opened: Callable[..., Backend] = request.param
    return opened(model, Timeline(), cache=cache, max_frames=192, usual_frames=144)


def noise(n_samples: int) -> NDArray[np.float32]:
    loudness = np.linspace(0.01, 0.5, n_samples)
    return (np.random.default_rng(n_samples).normal(size=n_samples) * loudness).astype(np.float32)


def said(emissions: list[Emission]) -> list[tuple[int, int, int]]:
    return [(emission.token_id, emission.frame, emission.duration) for emission in emissions]


def test_the_graph_decoder_writes_what_the_reference_does(model: Parakeet) -> None:
    generator = torch.Generator().manual_seed(4)
    frames = [torch.randn(n, CONFIG.d_predictor, generator=generator) for n in (60, 1, 0, 25, 7)]
    reference = TorchDecoder(model.to("cpu"))
    decoder = GraphDecoder(model, torch.zeros(1, device="cuda"), torch.cuda.Stream())
    wanted = reference.decode([(own, reference.start()) for own in frames])
    for _ in range(2):
        found = decoder.decode([(own.cuda(), decoder.start()) for own in frames])
        assert [said(emissions) for emissions, _ in found] == [said(emissions) for emissions, _ in wanted]
        assert [state.time_jump for _, state in found] == [state.time_jump for _, state in wanted]
    assert sum(len(emissions) for emissions, _ in wanted) > 20


def test_frames_in_pieces_write_the_same(backend: Backend) -> None:
    (frames,) = backend.listen([noise(100 * FRAME_SAMPLES)])
    ((whole, _),) = backend.decode([(frames, backend.start())])
    state, pieces = backend.start(), []
    for begin, end in ((0, 13), (13, 14), (14, 60), (60, 100)):
        ((emissions, state),) = backend.decode([(frames[begin:end], state)])
        pieces += [(token, begin + frame, duration) for token, frame, duration in said(emissions)]
    assert len(whole) > 10
    assert pieces == said(whole)


def test_the_small_model_says_of_real_speech_what_it_says_in_torch(tmp_path: Path) -> None:
    """On fewer SMs than the GPU has."""
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    try:
        samples, _ = soundfile.read(recording("beckett", fetch_missing=False), dtype="float32")
    except ModelUnavailableError as error:
        pytest.skip(str(error))
    model, _ = read_model(find_model("parakeet-tiny"))
    (frames,) = TorchBackend(model, max_buffers=1, max_frames=160).listen([samples])
    reference, decoder = TorchDecoder(model), decoder_on(model, find_device(), cache=tmp_path)
    ((expected, _),) = reference.decode([(frames, reference.start())])
    ((found, _),) = decoder.decode([(frames.cuda(), decoder.start())])
    decoder.close()
    assert len(found) > 20
    assert said(found) == said(expected)


def test_an_engine_streams_many_at_once(backend: Backend) -> None:
    pieces = Pieces((*(f" w{i}" if i % 3 == 0 else f"a{i}" for i in range(2048)), None))
    backends = Backends([Offer("this", lambda: backend)], model="random")
    engine = ParakeetEngine(backends, pieces, name="random", languages=("en",))
    streams = [engine.open(DecodeOptions()) for _ in range(70)]
    audio = noise(20 * FRAME_SAMPLES)
    chunk = Chunk(SpeechSpan(0, len(audio)), audio, is_final=True, is_first=True)
    answers = engine.decode([(stream, chunk) for stream in streams])
    texts = {"".join(word.text for word in answer.words) for answer in answers}
    assert len(answers) == 70
    assert len(texts) <= 2  # batches of another shape may round otherwise
    assert all(texts)
