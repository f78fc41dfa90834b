"""A small vocabulary of word pieces, learnt from transcripts.

It knows byte-pair merges and the mark `▁` that begins a word, as in Parakeet's own vocabularies, and writes the same
`tokenizer.json`. It does not know the network; the blank has the number behind the last piece.
"""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

UNKNOWN = "<unk>"


def learn_tokenizer(texts: Iterable[str], *, n_pieces: int) -> Tokenizer:
    """The ``n_pieces`` most useful pieces of the texts, `<unk>` first."""
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=n_pieces, special_tokens=[UNKNOWN], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def with_dropout(tokenizer: Tokenizer, probability: float) -> Tokenizer:
    """A copy that leaves out merges at random, so that a word is seen spelled in several ways (BPE-dropout, 2020)."""
    varied = Tokenizer.from_str(tokenizer.to_str())
    varied.model.dropout = probability
    return varied
