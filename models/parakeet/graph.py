"""Parakeet's prediction and joint networks for the megakernel: their step as a graph, constants by the graph's names.

Knows both vocabularies, that of checkpoints and that of the compiler. Does not know devices, frames' values or text.
"""

from collections.abc import Mapping

from torch import Tensor

from megakernel.graph import Builder, Graph
from megakernel.isa import MAX_SLOTS
from megakernel.ops import Sizes, Transducer

from .config import ParakeetConfig

_TOKENS = "decoder.embedding.weight"
_LSTM = "decoder.lstm"
PROJECTOR = "decoder.decoder_projector"
_HEAD = "joint.head"


def transducer_graph(config: ParakeetConfig, *, n_frames: int, n_seats: int, max_slots: int = MAX_SLOTS) -> Graph:
    """One step over the frames of ``max_slots`` slots, each of which takes one of ``n_seats`` after the other.

    A seat has room for ``n_frames``.

    Raises:
        CompileError: for sizes that make no graph.
    """
    transducer = Transducer(n_frames, n_seats, config.blank_id, config.durations, config.max_symbols)
    sizes = Sizes.for_transducer(
        width=config.d_predictor,
        n_layers=config.n_predictor_layers,
        n_tokens=config.vocabulary_size,
        max_slots=max_slots,
        transducer=transducer,
    )
    step = Builder("parakeet", sizes)
    x = step.lookup("token", tokens=_TOKENS)
    for layer in range(config.n_predictor_layers):
        x = step.lstm_step(f"lstm.{layer}", x, config.d_predictor, layer=layer, weights=_lstm_weights(layer))
    x = step.linear("predicted", x, config.d_predictor, weight=f"{PROJECTOR}.weight", bias=f"{PROJECTOR}.bias")
    step.transduce("next", step.joint("joint", x, weight=f"{_HEAD}.weight", bias=f"{_HEAD}.bias"))
    return step.build()


def _lstm_weights(layer: int) -> tuple[str, str, str, str]:
    first, second, third, fourth = (
        f"{_LSTM}.{name}_l{layer}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    return first, second, third, fourth


def graph_constants(graph: Graph, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of a checkpoint's tensors, or a module's state, those that the graph reads."""
    return {name: tensors[name].detach() for name in graph.constants}
