"""Vocabularies of the zoo's models, and files that have nothing else."""

from __future__ import annotations

from pathlib import Path

import gguf

SPECIALS = ("<unk>", "<s>", "</s>")
PIECES = ("\u2581", *"etaoinshrdlu", "th", "he", "in", "er", "\u2581the", "\u2581a")
N_VOCAB = len(SPECIALS) + 256 + len(PIECES)


def add_tokenizer(writer: gguf.GGUFWriter, n_words: int = 0) -> None:
    """A SentencePiece-style vocabulary of bytes and a few pieces, so that any text has tokens.

    `n_words`: as many words more, for a vocabulary of a real one's size.
    """
    pieces = [*PIECES, *(f"\u2581w{i}" for i in range(n_words))]
    tokens = [*SPECIALS, *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    kinds += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * len(pieces)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(SPECIALS) + [-1000.0] * 256 + [-float(i) for i in range(len(pieces))])
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)


def write_vocabulary(
    path: Path, kind: str, tokens: list[str], *, pre: str = "gpt-2", all_bytes: bool = True
) -> Path:
    """A file without weights: `tokens`, then the special ones. For `Llama(path, vocab_only=True)`.

    `all_bytes`: bytes that SentencePiece would not find among them follow; `pre` is how GPT-2's kind cuts.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    if kind == "llama" and all_bytes:
        tokens = [*tokens, *(f"<0x{b:02X}>" for b in range(256) if f"<0x{b:02X}>" not in tokens)]
    n, special = len(tokens), ["<unk>", "<s>", "</s>"]
    is_byte = [token.startswith("<0x") for token in tokens]
    writer.add_token_list([*tokens, *special])
    writer.add_token_scores([-float(i) for i in range(n + len(special))])
    normal = [gguf.TokenType.BYTE if byte else gguf.TokenType.NORMAL for byte in is_byte]
    writer.add_token_types([*normal, gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL])
    if kind == "gpt2":
        writer.add_token_merges(["t h"])
        writer.add_tokenizer_pre(pre)
    writer.add_unk_token_id(n)
    writer.add_bos_token_id(n + 1)
    writer.add_eos_token_id(n + 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_letters() -> list[str]:
    """GPT-2's letter for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def write_byte_vocabulary(path: Path, pre: str) -> Path:
    """As `write_vocabulary`: GPT-2's letters for bytes and no other tokens, cut as `pre` says."""
    return write_vocabulary(path, "gpt2", byte_letters(), pre=pre)
