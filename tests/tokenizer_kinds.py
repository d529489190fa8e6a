"""Small tokenizers made on the spot, one of each kind that models use."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = [
    "The quick brown fox jumps over the lazy dog, again and again; the dog sleeps on.",
    "naïve café déjà vu, Übergröße, señor, Ελληνικά, кириллица",
    "木の根は深い。森の樹液は甘い。", "emoji 🌳🌲👩‍👩‍👧 and flags 🇫🇷 mixed in",
]  # fmt: skip
START, END = SPECIAL = ["<|start|>", "<|end|>"]


@functools.cache
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens(
        [AddedToken("<tool>"), AddedToken("plain words"), AddedToken("日本"), AddedToken("Ġodd")]
    )
    return tokenizer


@functools.cache
def metaspace() -> Tokenizer:
    """Like Llama 2's: `▁` for spaces, byte fallback, one space stripped at the start."""
    pieces = ["<unk>", *SPECIAL, *(f"<0x{i:02X}>" for i in range(256))]
    pieces += [
        "▁",
        "▁▁",
        "\ufffd",
        "▁the",
        "▁dog",
        "dog",
        "s",
        "▁sleeps",
        ".",
        ",",
        "é",
        "▁木",
        "木",
        "\n",
        "▁▁a",
    ]
    letters = sorted({c for text in TEXTS[:2] for c in text} - set(pieces) - {" "})
    vocab = {piece: i for i, piece in enumerate(pieces + letters)}
    merges = [("▁", "▁")] + [(a, b) for a, b in [("▁", "木")] if a + b in vocab]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", *SPECIAL])
    tokenizer.add_tokens([AddedToken("<tool>")])
    return tokenizer
