"""The control tokens of real chat templates, and a small model that has them all."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import gguf

from support.models import zoo
from support.models.families import TEMPLATES
from support.models.zoo.vocabulary import byte_letters

_CONTROL = re.compile(
    r"<\|[^|<>' \n]{1,40}\|>|<｜[^｜\n]{1,40}｜>|<\|[a-z_]{1,30}>|<[a-z_]{1,30}\|>|\[/?[A-Z_]{3,30}\]"  # noqa: RUF001
    r"|</?s>|\[e~\[|\]~[a-z!]+[\[\]]|<SPECIAL_\d+>|<(?:start|end)_of_turn>|<(?:beginning|end)_of_sentence>|<sep>"
)
_USER_DEFINED = re.compile(r"</?(?:think|tool_call|tool_response|tools|arg_key|arg_value)>")
BOS, EOS = "<s>", "</s>"
# of each merge both halves are tokens: pairs that go across the edges of control tokens
_MERGES = (
    "< |;| >;i m;e n;en d;_ end;Ġ <;Ġ <|;Ġ< |;|> Ċ;t h;th e;Ġ the;e r;o n;[ /;I N;N S;IN S;Ċ <;Ċ <|;> Ċ;s >"
)


def templates() -> list[str]:
    """Names of llama.cpp's chat templates."""
    return sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


@cache
def source(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def control_tokens(name: str) -> tuple[str, ...]:
    """Control tokens that a template writes, and those that begin and end a sequence."""
    return tuple(sorted({*_CONTROL.findall(source(name)), BOS, EOS}))


def write_model(path: Path, template: str = "") -> Path:
    """A model whose vocabulary has the control tokens of all templates; its words are of GPT-2's kind."""
    names = templates()
    controls = sorted({token for name in names for token in control_tokens(name)})
    defined = sorted({token for name in names for token in _USER_DEFINED.findall(source(name))})
    merges, words = [], byte_letters()
    for merge in _MERGES.split(";"):
        left, _, right = merge.partition(" ")
        if left in words and right in words and left + right not in words:
            merges.append(merge)
            words.append(left + right)
    tokens = [*words, *controls, *defined]

    def add_tokenizer(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(tokens)
        writer.add_token_types(
            [gguf.TokenType.NORMAL] * len(words)
            + [gguf.TokenType.CONTROL] * len(controls)
            + [gguf.TokenType.USER_DEFINED] * len(defined)
        )
        writer.add_token_merges(merges)
        writer.add_bos_token_id(tokens.index(BOS))
        writer.add_eos_token_id(tokens.index(EOS))
        writer.add_add_bos_token(True)

    g = zoo.make("llama-64")
    g.add_words(len(tokens) - len(g.tensors["token_embd.weight"]))
    g.keys["context_length"] = 1 << 16
    g.tokenizer, g.chat_template = add_tokenizer, template
    g.write(path)
    return path
