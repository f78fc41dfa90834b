"""One window on its way to the encoder: how long it is made, how loud, and what follows the speech in it.

Knows samples, mel frames and encoder positions. Does not know what computes features or the encoder.
"""

from vad.audio import samples_from_ms

from ..mel import HOP_SAMPLES, WINDOW_FRAMES

FRAMES_PER_POSITION = 2
POSITION_SAMPLES = HOP_SAMPLES * FRAMES_PER_POSITION  # 20 ms
WINDOW_SAMPLES = WINDOW_FRAMES * HOP_SAMPLES

# What follows the speech in a short window (figures: benchmarks/results/whisper_padding.md).
PADDING_SAMPLES = samples_from_ms(500)  # real silence, so that the last word ends before the encoder does
TAIL_STRIDE = 4  # of the remembered silence behind it; at 8 one clip in 300 looped
LOUDEST_FEATURE = (1.5 + 4) / 4  # every window is brought to this level, so that one remembered silence fits all
QUIETEST_FEATURE = LOUDEST_FEATURE - 8 / 4  # features span eight decades of power, divided by four
DIGITAL_SILENCE = (-10 + 4) / 4  # the feature of no power at all


def encoded_positions(n_samples: int, n_audio_positions: int) -> int:
    """Encoder positions of a window of ``n_samples`` with the padding behind it, at most those that there are."""
    return min(-(-(n_samples + PADDING_SAMPLES) // POSITION_SAMPLES), n_audio_positions)
