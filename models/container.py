"""How a model's weights lie in files: which containers there are, and how shards are told from one whole.

Names only, apart from the readers in ``weights``, so that looking for files needs no torch.
"""

from enum import StrEnum

INDEX_SUFFIX = ".index.json"  # model.safetensors.index.json says which shard holds which tensor
NEMO_SUFFIX = ".nemo"  # of NeMo's archives


class WeightsKind(StrEnum):
    """The container that weights lie in."""

    CTRANSLATE2 = "ctranslate2"
    SAFETENSORS = "safetensors"
    NEMO = "nemo"  # configuration, weights and tokenizer in one archive
