"""The rival that the megakernel is measured against computes what Whisper's decoder computes."""

import torch

from benchmarks.decoder_step import TorchStep
from benchmarks.shapes import random_decoder
from models.whisper.config import WhisperConfig
from models.whisper.reference import Whisper

CONFIG = WhisperConfig(8, 90, 128, 2, 256, 1, 2, 20, 40, ((0, 0), (1, 0)))


@torch.inference_mode()
def test_the_rival_writes_what_the_reference_writes() -> None:
    tensors = {name: 20 * tensor.float() for name, tensor in random_decoder(CONFIG, "cpu").items()}
    model = Whisper(CONFIG).eval()
    own = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    model.load_state_dict(own | {"proj_out.weight": own["decoder.embed_tokens.weight"]}, strict=False)
    audio = torch.randn(2, CONFIG.n_audio_positions, CONFIG.width, generator=torch.Generator().manual_seed(4))
    cache = model.decoder.open_cache(audio)
    crossed = [torch.stack(pair, dim=1) for pair in zip(cache.cross_keys, cache.cross_values, strict=True)]
    step = TorchStep(CONFIG, tensors, torch.stack(crossed, dim=1))
    tokens = step.token.clone()
    written = set()
    for _ in range(30):
        step.run()
        tokens = model.logits(model.decoder(tokens, cache)).argmax(-1)
        assert torch.equal(step.token, tokens)
        written |= set(tokens.flatten().tolist())
    assert len(written) > 5
    compiled = torch.compile(step.run, backend="eager", fullgraph=True)
    step.position.fill_(3)
    compiled()
    assert int(step.position) == 4
