"""Drives the unmodified ``deepgram-sdk`` against a server; prints what it hands to an application, as JSON lines.

Runs in an environment that has only that client: imports nothing of this project.
"""

import argparse
import asyncio
import json
import wave

from deepgram import AsyncDeepgramClient, DeepgramClient
from deepgram.environment import DeepgramClientEnvironment

FRAME_S = 0.02


def environment_of(address: str) -> DeepgramClientEnvironment:
    """The hosted service's addresses, but for ours in their place."""
    http, ws = f"http://{address}", f"ws://{address}"
    return DeepgramClientEnvironment(base=http, production=ws, agent=ws, agent_rest=http)


def tell(message: object) -> None:
    """Print one message, with the class that the client parsed it to."""
    fields = message.model_dump() if hasattr(message, "model_dump") else {}
    print(json.dumps({"class": type(message).__name__, **fields}, default=str), flush=True)


async def live(arguments: argparse.Namespace) -> None:
    """A recording in real time, then a Finalize, then the end."""
    client = AsyncDeepgramClient(api_key=arguments.key, environment=environment_of(arguments.address))
    with wave.open(arguments.file) as file:
        rate_hz, pcm = file.getframerate(), file.readframes(file.getnframes())
    connection_of = client.listen.v1.connect(
        model="nova-3",
        encoding="linear16",
        sample_rate=str(rate_hz),
        interim_results="true",
        punctuate="true",
        vad_events="true",
        utterance_end_ms="1000",
        endpointing="300",
    )
    async with connection_of as connection:

        async def listen() -> None:
            async for message in connection:
                tell(message)

        listening = asyncio.create_task(listen())
        await connection.send_keep_alive()
        step = 2 * round(FRAME_S * rate_hz)
        for at in range(0, len(pcm), step):
            await connection.send_media(pcm[at : at + step])
            await asyncio.sleep(FRAME_S / arguments.pace)
        await connection.send_finalize()
        await connection.send_close_stream()
        await listening


async def turns(arguments: argparse.Namespace) -> None:
    """A recording in real time through the turn-based protocol."""
    client = AsyncDeepgramClient(api_key=arguments.key, environment=environment_of(arguments.address))
    with wave.open(arguments.file) as file:
        rate_hz, pcm = file.getframerate(), file.readframes(file.getnframes())
    async with client.listen.v2.connect(
        model="flux-general-en", encoding="linear16", sample_rate=str(rate_hz), eager_eot_threshold="0.5"
    ) as connection:

        async def listen() -> None:
            async for message in connection:
                tell(message)

        listening = asyncio.create_task(listen())
        step = 2 * round(FRAME_S * rate_hz)
        for at in range(0, len(pcm), step):
            await connection.send_media(pcm[at : at + step])
            await asyncio.sleep(FRAME_S / arguments.pace)
        await connection.send_close_stream()
        await listening


def recording(arguments: argparse.Namespace) -> None:
    """A file by POST."""
    client = DeepgramClient(api_key=arguments.key, environment=environment_of(arguments.address))
    with open(arguments.file, "rb") as file:
        answer = client.listen.v1.media.transcribe_file(
            request=file.read(),
            model="nova-3",
            punctuate=True,
            utterances=True,
            paragraphs=True,
            multichannel=arguments.multichannel,
        )
    tell(answer)


def main() -> None:
    """See the flags."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("live", "turns", "recording"))
    parser.add_argument("--address", required=True)
    parser.add_argument("--file", required=True)
    parser.add_argument("--key", default="unused")
    parser.add_argument("--multichannel", action="store_true")
    parser.add_argument("--pace", type=float, default=1.0, help="times real time")
    arguments = parser.parse_args()
    match arguments.what:
        case "live":
            asyncio.run(live(arguments))
        case "turns":
            asyncio.run(turns(arguments))
        case "recording":
            recording(arguments)


if __name__ == "__main__":
    main()
