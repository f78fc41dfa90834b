"""The network against transformers' ``WhisperForConditionalGeneration``, random weights, and its cache."""

import pytest
import torch
import transformers

from gateway.audio_file import read_audio
from models.errors import ModelUnavailableError, WeightsError
from models.mel import log_mel
from models.store import find_model, read_config, recording
from models.tokenizer import WhisperTokenizer
from models.weights import read_weights
from models.whisper.config import WhisperConfig
from models.whisper.reference import SilentTail, Whisper

CONFIGS = {
    "deep": WhisperConfig(80, 96, 64, 1, 256, 3, 2, 60, 32, ((0, 0), (1, 0))),
    "wide": WhisperConfig(128, 200, 192, 3, 320, 1, 3, 40, 24, ((1, 2), (2, 0), (2, 1))),
}
# float32 sums of a few hundred products in another order: about 1e-6 relative, through some ten layers.
TOLERANCE = 2e-5

# What is said in the recording.
SAID = " Ever tried, ever failed. No matter, try again. Fail again. Fail better."


def reference_class(config: WhisperConfig) -> transformers.WhisperForConditionalGeneration:
    """The class to compare with, of the same sizes, its weights random."""
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            vocab_size=config.n_vocab,
            num_mel_bins=config.n_mels,
            d_model=config.width,
            encoder_layers=config.n_encoder_layers,
            decoder_layers=config.n_decoder_layers,
            encoder_attention_heads=config.n_heads,
            decoder_attention_heads=config.n_heads,
            encoder_ffn_dim=config.n_ffn,
            decoder_ffn_dim=config.n_ffn,
            max_source_positions=config.n_audio_positions,
            max_target_positions=config.n_text_positions,
            pad_token_id=0,
            bos_token_id=0,
            eos_token_id=0,
            decoder_start_token_id=1,
            attn_implementation="eager",
        )
    ).eval()


@pytest.fixture(params=list(CONFIGS))
def models(request: pytest.FixtureRequest) -> tuple[transformers.WhisperForConditionalGeneration, Whisper]:
    """The reference class with random weights (biases and norms too), and ours with the same."""
    torch.manual_seed(0)
    config = CONFIGS[request.param]
    theirs = reference_class(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours = Whisper(config).eval()
    ours.load(theirs.state_dict())
    return theirs, ours


def random_input(config: WhisperConfig, *, n_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    mel = torch.randn(2, config.n_mels, 2 * config.n_audio_positions)
    return mel, torch.randint(config.n_vocab, (2, n_tokens))


@torch.inference_mode()
def test_logits_and_alignment_scores_equal_those_of_transformers(models) -> None:
    theirs, ours = models
    mel, tokens = random_input(ours.config, n_tokens=10)
    expected = theirs(input_features=mel, decoder_input_ids=tokens, output_attentions=True)
    cache = ours.decoder.open_cache(ours.encoder(mel))
    logits = ours.logits(ours.decoder(tokens, cache))
    torch.testing.assert_close(logits, expected.logits, atol=TOLERANCE, rtol=TOLERANCE)
    for (layer, head), scores in zip(ours.config.alignment_heads, cache.alignment_scores, strict=True):
        weights = expected.cross_attentions[layer][:, head]
        torch.testing.assert_close(scores.softmax(-1), weights, atol=TOLERANCE, rtol=TOLERANCE)


@torch.inference_mode()
def test_any_split_of_the_tokens_over_calls_gives_the_same_logits(models) -> None:
    _, ours = models
    mel, tokens = random_input(ours.config, n_tokens=12)
    audio = ours.encoder(mel)
    whole = ours.logits(ours.decoder(tokens, ours.decoder.open_cache(audio)))
    cache = ours.decoder.open_cache(audio)
    parts = [ours.logits(ours.decoder(part, cache)) for part in tokens.split([1, 4, 1, 6], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=TOLERANCE, rtol=TOLERANCE)


@torch.inference_mode()
def test_tokens_taken_back_from_the_cache_leave_no_trace(models) -> None:
    _, ours = models
    mel, tokens = random_input(ours.config, n_tokens=9)
    audio = ours.encoder(mel)
    expected = ours.decoder(tokens, ours.decoder.open_cache(audio))[:, -1]
    cache = ours.decoder.open_cache(audio)
    ours.decoder(tokens[:, :5], cache)
    ours.decoder(tokens.flip(0)[:, :3], cache)
    cache.n_tokens = 5
    torch.testing.assert_close(ours.decoder(tokens[:, 5:], cache)[:, -1], expected, atol=TOLERANCE, rtol=TOLERANCE)


@torch.inference_mode()
def test_a_short_window_is_the_encoder_over_a_prefix_of_the_positions(models) -> None:
    theirs, ours = models
    mel, _ = random_input(ours.config, n_tokens=1)
    n_positions = ours.config.n_audio_positions // 2
    short = mel[..., : 2 * n_positions]
    shorter = transformers.WhisperConfig.from_dict(theirs.config.to_dict() | {"max_source_positions": n_positions})
    shorter._attn_implementation = "eager"
    encoder = transformers.models.whisper.modeling_whisper.WhisperEncoder(shorter).eval()
    state = theirs.model.encoder.state_dict()
    state["embed_positions.weight"] = state["embed_positions.weight"][:n_positions]
    encoder.load_state_dict(state)
    torch.testing.assert_close(ours.encoder(short), encoder(short)[0], atol=TOLERANCE, rtol=TOLERANCE)


@torch.inference_mode()
def test_a_tail_of_every_position_of_silence_is_the_full_window(models) -> None:
    _, ours = models
    n_positions = ours.config.n_audio_positions
    silence = torch.zeros(1, ours.config.n_mels, 2 * n_positions)  # what a convolution sees beyond its edge, too
    tokens = torch.randint(ours.config.n_vocab, (1, 5))
    audio = ours.encoder(silence)
    whole = ours.decoder(tokens, ours.decoder.open_cache(audio))
    tail = ours.silent_tail(silence, stride=1)
    short = ours.encoder(silence[..., :32], tail)
    torch.testing.assert_close(short, audio[:, :16], atol=TOLERANCE, rtol=TOLERANCE)
    hidden = ours.decoder(tokens, ours.decoder.open_cache(short, tail))
    torch.testing.assert_close(hidden, whole, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_remembered_position_weighs_as_much_as_those_it_stands_for() -> None:
    remembered = torch.arange(10.0).reshape(1, 1, 10, 1)
    tail = SilentTail([remembered], [remembered], [remembered], [remembered], stride=4)
    own = torch.zeros(1, 1, 6, 1)
    assert tail.behind(own, remembered).flatten().tolist() == [0.0] * 6 + [2.0, 3, 4, 5, 6, 7, 8, 9]
    assert tail.bias(6).exp().tolist() == pytest.approx([1.0] * 6 + [4.0] * 8)


@pytest.mark.parametrize("n_positions", [37, 38, 39, 40, 41])
def test_behind_a_full_window_nothing_is_remembered(n_positions: int) -> None:
    remembered = torch.zeros(1, 1, 10, 1)
    tail = SilentTail([remembered], [remembered], [remembered], [remembered], stride=4)
    own = torch.zeros(1, 1, n_positions, 1)
    assert tail.behind(own, remembered).shape[2] == n_positions
    assert tail.bias(n_positions).tolist() == [0.0] * n_positions


def test_a_window_longer_than_the_positions_is_refused() -> None:
    model = Whisper(CONFIGS["deep"])
    with pytest.raises(ValueError, match="even number of mel frames up to 120"):
        model.encoder(torch.zeros(1, 80, 122))


@torch.inference_mode()
def test_more_tokens_than_the_decoder_has_positions_are_refused() -> None:
    model = Whisper(CONFIGS["deep"])
    cache = model.decoder.open_cache(torch.zeros(1, 4, 64))
    with pytest.raises(ValueError, match="33 tokens exceed"):
        model.decoder(torch.zeros(1, 33, dtype=torch.long), cache)


def test_weights_of_another_size_are_refused(models) -> None:
    theirs, _ = models
    with pytest.raises(WeightsError):
        Whisper(WhisperConfig(80, 96, 128, 2, 256, 3, 2, 60, 32, ())).load(theirs.state_dict())


@pytest.mark.weights
@pytest.mark.parametrize("name", ["whisper-tiny.en", "whisper-base"])
@torch.inference_mode()
def test_real_weights_give_the_logits_of_transformers(name: str) -> None:
    """float32, the full window, a real voice: every logit, and the token chosen at every place."""
    try:
        files, path = find_model(name), recording("beckett")
    except ModelUnavailableError as error:
        pytest.skip(str(error))
    tensors = read_weights(files.weights, files.weights_kind)
    config = WhisperConfig.of({key: tuple(tensor.shape) for key, tensor in tensors.items()}, read_config(files))
    ours, theirs = Whisper(config).eval(), reference_class(config)
    ours.load(tensors)
    theirs.load_state_dict({key: tensor.float() for key, tensor in tensors.items()}, strict=False)
    samples, _ = read_audio(path)
    mel = log_mel(samples, config.n_mels)[None]
    tokenizer = WhisperTokenizer.load(files.tokenizer)
    language = [tokenizer.language_ids["en"], tokenizer.transcribe] if tokenizer.is_multilingual else []
    tokens = torch.tensor([[tokenizer.sot, *language, tokenizer.timestamp_begin, *tokenizer.encode(SAID)]])
    expected = theirs(input_features=mel, decoder_input_ids=tokens).logits
    logits = ours.logits(ours.decoder(tokens, ours.decoder.open_cache(ours.encoder(mel))))
    # Logits lie around 20; float32 sums over 1500 positions in another order differ by 1e-5 of that.
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-4)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
