"""What the server counts, in the form that Prometheus reads.

Knows names, labels and buckets. Does not know where figures come from. Each server has a registry of its own, so that
several can live in one process.
"""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from gateway.timing import Delay, Observation

CONTENT_TYPE = CONTENT_TYPE_LATEST
DELAY_BUCKETS_S = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
LOOP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)

_DELAY_HELP = {
    Delay.FIRST_PARTIAL: "Seconds from the onset of speech to its first text",
    Delay.TIME_TO_FINAL: "Seconds from the end of speech to its final",
    Delay.WORD_SHOWN: "Seconds from a word's end to its first showing",
    Delay.WORD_SETTLED: "Seconds from a word's end to the text that does not change any more",
}


class Metrics:
    """The figures of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.sessions = Gauge("senseway_sessions", "Sessions that live", ["door"], registry=self._registry)
        self.connections = Gauge("senseway_connections", "Open connections", ["door"], registry=self._registry)
        self.audio_seconds = Counter(
            "senseway_audio_seconds", "Seconds of audio taken", ["door"], registry=self._registry
        )
        self.errors = Counter("senseway_errors", "Errors told to clients, by code", ["code"], registry=self._registry)
        self.refusals = Counter(
            "senseway_refusals", "Connections and requests turned away", ["door", "code"], registry=self._registry
        )
        self.decode_seconds = Histogram(
            "senseway_decode_seconds", "Time of one batch in the engine", registry=self._registry
        )
        self.turn_seconds = Histogram(
            "senseway_turn_seconds", "Time of one pause in the model of turns", registry=self._registry
        )
        self.turns_unjudged = Counter(
            "senseway_turns_unjudged",
            "Pauses that the model of turns did not judge, or not in time",
            registry=self._registry,
        )
        self.loop_lag_seconds = Histogram(
            "senseway_loop_lag_seconds",
            "How late the event loop comes to a timer",
            buckets=LOOP_BUCKETS_S,
            registry=self._registry,
        )
        self._delays = {
            delay: Histogram(
                f"senseway_{delay}_seconds", text, ["door"], buckets=DELAY_BUCKETS_S, registry=self._registry
            )
            for delay, text in _DELAY_HELP.items()
        }

    def watch(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        """A gauge that is asked when it is read."""
        Gauge(f"senseway_{name}", help_text, registry=self._registry).set_function(value)

    def observe(self, door: str, observations: list[Observation]) -> None:
        """Keep measured delays."""
        for observation in observations:
            self._delays[observation.delay].labels(door).observe(observation.seconds)

    def text(self) -> bytes:
        """All of it, as ``/metrics`` answers."""
        return generate_latest(self._registry)


def labelled(texts: Mapping[str, bytes]) -> bytes:
    """The figures of several workers as one: each has its worker's name as a label."""
    families: dict[str, Metric] = {}
    for worker, text in texts.items():
        for family in text_string_to_metric_families(text.decode()):
            joint = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                joint.add_sample(sample.name, {**sample.labels, "worker": worker}, sample.value)
    return generate_latest(_Families(families))


class _Families(CollectorRegistry):
    """Figures that were collected elsewhere."""

    def __init__(self, families: Mapping[str, Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """See ``CollectorRegistry``."""
        yield from self._families.values()
