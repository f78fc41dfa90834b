"""Drives the unmodified ``openai`` client against a server; prints what it hands to an application, as JSON lines.

Runs in an environment that has only that client: imports nothing of this project.
"""

import argparse
import asyncio
import base64
import json
import sys
import wave
from pathlib import Path

import openai
from openai import AsyncOpenAI, OpenAI

PACKET_S = 0.05


def tell(thing: object, **more: object) -> None:
    """Print one object the client gave us, with the class that it parsed it to."""
    fields = thing.model_dump() if hasattr(thing, "model_dump") else {"value": thing}
    print(json.dumps({"class": type(thing).__name__, **fields, **more}), flush=True)


async def realtime(arguments: argparse.Namespace) -> None:
    """One conversation; ends when every committed item is complete and the audio has been sent."""
    client = AsyncOpenAI(base_url=arguments.url, api_key=arguments.key)
    with wave.open(arguments.file) as file:
        rate_hz, pcm = file.getframerate(), file.readframes(file.getnframes())
    turns = {
        "none": None,
        "server_vad": {"type": "server_vad"},
        "semantic_vad": {"type": "semantic_vad", "eagerness": "high"},
    }[arguments.turns]
    heard_all, n_open, is_sent = asyncio.Event(), 0, False
    async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:

        async def send() -> None:
            given = {
                "format": {"type": "audio/pcm", "rate": rate_hz},
                "transcription": {"model": "gpt-4o-transcribe", "language": "en"},
                "turn_detection": turns,
            }
            await connection.session.update(session={"type": "transcription", "audio": {"input": given}})
            step = 2 * round(PACKET_S * rate_hz)
            for at in range(0, len(pcm), step):
                audio = base64.b64encode(pcm[at : at + step]).decode()
                await connection.input_audio_buffer.append(audio=audio)
                if arguments.pace:
                    await asyncio.sleep(PACKET_S / arguments.pace)
            if turns is None:
                await connection.input_audio_buffer.commit()

        async def listen() -> None:
            nonlocal n_open
            async for event in connection:
                tell(event)
                n_open += (event.type == "input_audio_buffer.speech_started") or (
                    turns is None and event.type == "input_audio_buffer.committed"
                )
                n_open -= event.type == "conversation.item.input_audio_transcription.completed"
                if is_sent and n_open == 0:
                    heard_all.set()

        listening = asyncio.create_task(listen())
        await send()
        is_sent = True
        if turns is not None and n_open == 0:  # the silence behind the last turn was long enough to end it
            heard_all.set()
        await asyncio.wait({asyncio.create_task(heard_all.wait()), listening}, return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()


async def reconnect(arguments: argparse.Namespace) -> None:
    """Connect and wait for the server to go; the close code that the client wants to come back on."""
    client = AsyncOpenAI(base_url=arguments.url, api_key=arguments.key)
    told = asyncio.Event()

    def on_reconnecting(event: object) -> None:
        print(json.dumps({"reconnecting": True, "close_code": event.close_code}), flush=True)
        told.set()

    connection_of = client.realtime.connect(
        extra_query={"intent": "transcription"}, on_reconnecting=on_reconnecting, max_retries=1
    )
    async with connection_of as connection:

        async def listen() -> None:
            async for event in connection:
                tell(event)
                await connection.input_audio_buffer.append(audio=base64.b64encode(bytes(4_800)).decode())

        listening = asyncio.create_task(listen())
        await told.wait()
        listening.cancel()


async def refused(arguments: argparse.Namespace) -> None:
    """What the application sees of a wrong key."""
    client = AsyncOpenAI(base_url=arguments.url, api_key=arguments.key)
    try:
        async with client.realtime.connect(extra_query={"intent": "transcription"}):
            print(json.dumps({"refused": False}))
    except Exception as error:  # whatever the client raises is what we want to see
        response = getattr(error, "response", None)
        print(json.dumps({"refused": True, "class": type(error).__name__, "status": response.status_code}))


def rest(arguments: argparse.Namespace) -> None:
    """One request in each shape."""
    client = OpenAI(base_url=arguments.url, api_key=arguments.key)
    path = Path(arguments.file)
    for name in ("json", "text", "srt", "vtt"):
        with path.open("rb") as file:
            tell(client.audio.transcriptions.create(file=file, model="whisper-1", response_format=name), shape=name)
    with path.open("rb") as file:
        verbose = client.audio.transcriptions.create(
            file=file,
            model="gpt-4o-transcribe",
            language="en",
            response_format="verbose_json",
            timestamp_granularities=["word", "segment"],
        )
        tell(verbose, shape="verbose_json")
    with path.open("rb") as file:
        stream = client.audio.transcriptions.create(
            file=file,
            model="gpt-4o-transcribe",
            stream=True,
            chunking_strategy={"type": "server_vad", "silence_duration_ms": 400},
        )
        for event in stream:
            tell(event, shape="stream")
    for model in client.models.list():
        tell(model, shape="models")
    try:
        client.audio.transcriptions.create(file=("a.wav", b"nonsense"), model="whisper-1")
    except openai.BadRequestError as error:
        print(json.dumps({"shape": "error", "class": type(error).__name__, "code": error.code, "param": error.param}))


def speakers(arguments: argparse.Namespace) -> None:
    """A recording with a speaker on each channel, whole and as a stream."""
    client = OpenAI(base_url=arguments.url, api_key=arguments.key)
    asked = {"model": "gpt-4o-transcribe-diarize", "response_format": "diarized_json", "chunking_strategy": "auto"}
    with open(arguments.file, "rb") as file:
        tell(client.audio.transcriptions.create(file=file, extra_body={"known_speaker_names": ["Ann", "Bob"]}, **asked))
    with open(arguments.file, "rb") as file:
        for event in client.audio.transcriptions.create(file=file, stream=True, **asked):
            tell(event)


def main() -> None:
    """See the flags."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("realtime", "reconnect", "refused", "rest", "speakers", "version"))
    parser.add_argument("--url")
    parser.add_argument("--file")
    parser.add_argument("--key", default="unused")
    parser.add_argument("--turns", default="server_vad", choices=("server_vad", "semantic_vad", "none"))
    parser.add_argument("--pace", type=float, default=0.0, help="times real time; 0: as fast as it goes")
    arguments = parser.parse_args()
    match arguments.what:
        case "realtime":
            asyncio.run(realtime(arguments))
        case "reconnect":
            asyncio.run(reconnect(arguments))
        case "refused":
            asyncio.run(refused(arguments))
        case "rest":
            rest(arguments)
        case "speakers":
            speakers(arguments)
        case "version":
            print(json.dumps({"version": openai.__version__}))


if __name__ == "__main__":
    sys.exit(main())
