"""Real tokenizers with small vocabularies, built in memory."""

from __future__ import annotations

from string import ascii_letters, ascii_lowercase, digits

from transformers import CLIPTokenizer, GemmaTokenizer, LlamaTokenizerFast, Qwen2Tokenizer, T5Tokenizer

_BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def t5_tokenizer() -> T5Tokenizer:
    """Unigram tokenizer of single characters."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    pieces += [(letter, -3.0 - 0.01 * rank) for rank, letter in enumerate(ascii_letters + digits + ".,!?-'\"")]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=512)


def clip_tokenizer() -> CLIPTokenizer:
    """Byte-level tokenizer without merges; the last two entries begin and end a text."""
    symbols = byte_level_symbols()
    symbols += [f"{symbol}</w>" for symbol in symbols]
    return CLIPTokenizer(
        vocab=_numbered([*symbols, "<|startoftext|>", "<|endoftext|>"]), merges=[], model_max_length=77
    )


def qwen_tokenizer() -> Qwen2Tokenizer:
    """Byte-level tokenizer with the chat markers of Qwen."""
    vocabulary = _numbered([*byte_level_symbols(), "<|endoftext|>"])
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], model_max_length=1024)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


def gemma_tokenizer() -> GemmaTokenizer:
    """Byte-fallback tokenizer that pads on the right, as Sana's does."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "\u2581"]
    vocabulary = _numbered(special + _BYTE_TOKENS + list(ascii_lowercase))
    tokenizer = GemmaTokenizer(vocab=vocabulary, merges=[], model_max_length=512)
    tokenizer.padding_side = "right"
    return tokenizer


def llama_tokenizer() -> LlamaTokenizerFast:
    """Byte-fallback tokenizer."""
    vocabulary = _numbered(["<unk>", "<s>", "</s>", "\u2581", *_BYTE_TOKENS])
    return LlamaTokenizerFast(vocab=vocabulary, merges=[], pad_token="</s>", model_max_length=512)


def byte_level_symbols() -> list[str]:
    """The 256 printable characters that stand for the bytes in a byte-level vocabulary."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unprintable = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in sorted(printable)] + [chr(256 + rank) for rank in range(len(unprintable))]


def _numbered(symbols: list[str]) -> dict[str, int]:
    return {symbol: number for number, symbol in enumerate(symbols)}
