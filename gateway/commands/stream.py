"""`senseway stream`: a file, a pipe or a microphone through a running server, with captions as they come.

Knows flags and pacing. The socket is the client's, the audio is ``audio_source``'s, the view is ``captions``'s.
"""

import argparse
import asyncio
import math
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from gateway.client import DEFAULT_URL, AudioFormat, ConnectionFailedError, Hello, Ready, StreamClient, Wire, connect
from gateway.client_session import BYTES_PER_SAMPLE
from gateway.commands.audio_source import AudioSource, open_source
from gateway.commands.captions import Captions, EventView, JsonLines
from gateway.commands.failure import CommandError
from gateway.config import API_KEY_VARIABLE
from gateway.together import run_together

HELP = "send a recording, a pipe or the microphone to a server and print what it hears"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare flags and positions."""
    parser.add_argument("source", metavar="FILE|-|mic", help="an audio file, - for standard input, or mic")
    parser.add_argument("--url", default=DEFAULT_URL, help="the server's stream endpoint")
    parser.add_argument(
        "--speed", type=factor, default=1.0, help="1.0 sends as if spoken now, 2.0 twice as fast, max all at once"
    )
    parser.add_argument(
        "--format", choices=("text", "jsonl"), default="text", help="captions, or one JSON object a line"
    )
    parser.add_argument("--wire", choices=("json", "msgpack"), default="msgpack", help="how messages are encoded")
    wishes = parser.add_argument_group("what to ask the server for")
    wishes.add_argument("--model", help="a model that the server has; its first unless given")
    wishes.add_argument("--language", help="ISO 639-1 code, de say; detected unless given")
    wishes.add_argument("--translate", action="store_true", help="write English, whatever is spoken")
    wishes.add_argument(
        "--vocabulary", action="append", default=[], metavar="TERM", help="a term to expect; repeatable"
    )
    wishes.add_argument("--context", default="", help="text that came before the first word")
    wishes.add_argument(
        "--require", action="append", default=[], metavar="CAPABILITY", help="refuse to go on without it"
    )
    wishes.add_argument("--hangover-ms", type=int, help="silence that ends an utterance")
    wishes.add_argument("--partial-interval-ms", type=int, help="least time between partials")
    wishes.add_argument("--chunk-ms", type=int, help="how much audio a model that decodes in chunks takes at a time")
    wishes.add_argument(
        "--second-pass", action="store_true", help="with such a model, decode finals again in one piece"
    )
    raw = parser.add_argument_group("raw audio on standard input")
    raw.add_argument("--encoding", choices=tuple(BYTES_PER_SAMPLE), help="read - as raw samples of this encoding")
    raw.add_argument("--rate", type=int, default=16_000, help="its sample rate in Hz")
    raw.add_argument("--channels", type=int, default=1, help="its interleaved channels, which are mixed down")


def run(arguments: argparse.Namespace) -> int:
    """Stream until the source ends; on a microphone until Ctrl-C."""
    try:
        asyncio.run(_stream(arguments))
    except ConnectionFailedError as error:
        hint = f"is a server running there? `senseway serve` starts one, whose stream is at {DEFAULT_URL}"
        raise CommandError(f"{error}; {hint}") from error
    return 0


def factor(text: str) -> float:
    """``--speed``: a factor above 0, or ``max`` for infinity."""
    value = math.inf if text == "max" else float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


async def _stream(arguments: argparse.Namespace) -> None:
    raw = AudioFormat(arguments.encoding, arguments.rate, arguments.channels) if arguments.encoding else None
    source = open_source(arguments.source, raw=raw)
    async with connect(
        arguments.url,
        hello_from(arguments, source.format),
        wire=Wire[arguments.wire.upper()],
        api_key=os.environ.get(API_KEY_VARIABLE),
    ) as stream:
        view = _view(arguments.format, stream)
        try:
            speed = math.inf if source.is_live else arguments.speed
            await run_together(send_all(stream, paced(source, speed)), show_events(stream, view))
        finally:
            view.close()


def hello_from(arguments: argparse.Namespace, audio: AudioFormat) -> Hello:
    """What the flags ask the server for."""
    return Hello(
        audio=audio,
        model=arguments.model,
        language=arguments.language,
        task="translate" if arguments.translate else None,
        vocabulary=tuple(arguments.vocabulary),
        context=arguments.context,
        require=tuple(arguments.require),
        hangover_ms=arguments.hangover_ms,
        partial_interval_ms=arguments.partial_interval_ms,
        chunk_ms=arguments.chunk_ms,
        second_pass=arguments.second_pass or None,
    )


async def paced(
    source: AudioSource,
    speed: float,
    *,
    now_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncIterator[bytes]:
    """The source's packets, each when its last sample would have been spoken at ``speed``; infinity never waits."""
    began_s = now_s()
    n_bytes = 0
    async for packet in source.packets:
        n_bytes += len(packet)
        due_s = began_s + n_bytes / source.format.bytes_per_s / speed
        await sleep(max(0.0, due_s - now_s()))
        yield packet


async def send_all(stream: StreamClient, packets: AsyncIterator[bytes]) -> None:
    """Send every packet, and bye behind the last."""
    async for packet in packets:
        await stream.send_audio(packet)
    await stream.bye()


async def show_events(stream: StreamClient, view: EventView) -> None:
    """Show every event until the session is over."""
    async for event in stream:
        view.show(event, sent_s=stream.sent_s)


def greeting(ready: Ready) -> str:
    """One line on what was granted."""
    chunking = ready.chunking
    late = f"; words are settled {chunking.latency_ms} ms behind the audio" if chunking else ""
    return f"{ready.model} listens{late}" + (f"; not offered: {', '.join(ready.declined)}" if ready.declined else "")


def _view(form: str, stream: StreamClient) -> EventView:
    if form == "jsonl":
        return JsonLines(sys.stdout)
    print(greeting(stream.ready), file=sys.stderr)
    return Captions(sys.stdout, is_terminal=sys.stdout.isatty(), columns=shutil.get_terminal_size().columns)
