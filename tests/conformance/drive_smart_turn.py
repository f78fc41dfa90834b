"""Pipecat's own code for its model of turns, on the audio of a WAV file: features and probability, as JSON."""

import asyncio
import json
import sys
import wave

import numpy as np
from pipecat.audio.turn.smart_turn._whisper_features import compute_whisper_log_mel_features
from pipecat.audio.turn.smart_turn.local_smart_turn_v3 import LocalSmartTurnAnalyzerV3

MAX_SAMPLES = 8 * 16_000


async def judge(path: str) -> None:
    with wave.open(path) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32_768
    last = samples[-MAX_SAMPLES:]
    features = compute_whisper_log_mel_features(np.pad(last, (MAX_SAMPLES - len(last), 0)))
    analyzer = LocalSmartTurnAnalyzerV3(sample_rate=16_000)
    analyzer.set_sample_rate(16_000)
    print(json.dumps({"features": features.tolist(), **analyzer._predict_endpoint(samples)}))


asyncio.run(judge(sys.argv[1]))
