"""Is it time to decode. Pure, and on the audio's clock: how much was heard since the last decode, not how late it is.

A busy machine needs no rule of its own: a session has one decode under way at most, so partials thin out by themselves.
"""

from dataclasses import dataclass

from vad.audio import samples_from_ms


@dataclass(frozen=True, slots=True)
class Pacing:
    """When partials are due and how long one span of speech may grow."""

    first_partial_samples: int = samples_from_ms(640)  # pre-roll included: about 300 ms of speech
    partial_interval_samples: int = samples_from_ms(500)
    max_span_samples: int = samples_from_ms(15_000)


def partial_is_due(heard_samples: int, decoded_samples: int, pacing: Pacing) -> bool:
    """Whether a span of ``heard_samples``, the last decode of which saw ``decoded_samples``, deserves another."""
    if decoded_samples == 0:
        return heard_samples >= pacing.first_partial_samples
    return heard_samples - decoded_samples >= pacing.partial_interval_samples
