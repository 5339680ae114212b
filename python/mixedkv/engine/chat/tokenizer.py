"""Tokenizes texts and renders chats.

This needs the vocabulary but no context, so it can run on any thread while the engine decodes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from typing import Any, cast

import llama_cpp
import numpy as np
from llama_cpp import llama_chat_format

from mixedkv.constrain.constraint import ConstraintCompiler, Matcher
from mixedkv.constrain.constraint_text import Constraint
from mixedkv.engine.chat import generic_tools
from mixedkv.engine.chat.bare_calls import BareCalls
from mixedkv.engine.chat.chat_template import Chat, ChatRenderer, RenderedChat
from mixedkv.engine.chat.text_tokenizer import TextTokenizer
from mixedkv.engine.sample.sampler import Sampler
from mixedkv.engine.sample.sampling import Sampling
from mixedkv.engine.text.thought import Thought, ThoughtTags
from mixedkv.errors import UnsupportedModelError
from mixedkv.limits import INT32_MAX
from mixedkv.llama import NO_VOCABULARY, Llama
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.native.chat_formats import chat_formatter
from mixedkv.native.templates import syntax_error
from mixedkv.prompts.content_marks import ContentMarks
from mixedkv.prompts.overflow import Places, message_starts
from mixedkv.prompts.part import MARK, Insert
from mixedkv.tokens import Tokens, check_tokens

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int] | Messages | Chat

_CONTROL = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL
_SNIPPET = "\n\n--- snippet ---\n\n"  # llama-server's, between files


class Tokenizer(TextTokenizer):
    """The tokenizer and the chat template of a model.

    Args:
        chat_format: name of one of llama-cpp-python's chat formats, for a model without a template; "" for
            none.
        chat_template: Jinja template to use in place of the model's own.

    Raises:
        ValueError: there is no such format.
        UnsupportedModelError: the model has no vocabulary.
    """

    def __init__(self, llm: Llama, chat_format: str = "", chat_template: str = "") -> None:
        if not _llama_cpp.has_vocabulary(llm):
            raise UnsupportedModelError(NO_VOCABULARY)
        super().__init__(llm)
        self._eos = self._token_text(llm.token_eos())
        bos = self._token_text(llm.token_bos())
        own = llm.metadata.get("tokenizer.chat_template", "")
        self.chat_template: str = "" if chat_format else chat_template or own
        self._formatter = _make_formatter(chat_format, self.chat_template, bos, self._eos)
        self._cuts = f"{self.chat_template}{{{{ {MARK!r} }}}}"  # what `ContentMarks` asks for
        self._renderer = ChatRenderer(self.chat_template, bos, self._eos)
        self._is_control = np.zeros(self.n_vocab, bool)
        self._is_control[[token for token, _, attributes in llm.special_tokens if attributes & _CONTROL]] = (
            True
        )
        self._fim = (
            llama_cpp.llama_vocab_fim_pre(self._vocab),
            llama_cpp.llama_vocab_fim_suf(self._vocab),
            llama_cpp.llama_vocab_fim_mid(self._vocab),
        )
        self._fim_file = llama_cpp.llama_vocab_fim_sep(self._vocab)

    @cached_property
    def _constraints(self) -> ConstraintCompiler:
        return ConstraintCompiler(self._vocab)

    def prepare_constraints(self) -> None:
        """Read the vocabulary for constraints now, which takes up to a second, and not with the first one."""
        _ = self._constraints

    @staticmethod
    def template_thinks(template: str) -> bool:
        """Return whether a chat template handles thoughts, without a loaded model."""
        return ChatRenderer(template, "", "").thinks

    def boundaries(self, tokens: Tokens) -> Places:
        """Return where messages of a chat begin and end: at the control tokens of its template."""
        return np.flatnonzero(self._is_control[np.maximum(tokens, 0)] & (tokens >= 0))

    def message_starts(self, tokens: Tokens) -> Places:
        """Return where messages of a chat begin, judging by its tokens."""
        return message_starts(self._vocab, tokens)

    def encode(self, prompt: Prompt, *, long: bool = False) -> tuple[list[int], RenderedChat]:
        """Return the tokens of a text, a list of token ids or a chat, and how its answer is read.

        Args:
            long: allow more tokens than the context has room for; the same in the methods below.

        Raises:
            ValueError: as `prompt` and `render`.
        """
        if isinstance(prompt, Chat):
            return self.render(prompt, long=long)
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            return self.render(Chat(messages=cast(Messages, prompt)), long=long)
        return self.prompt(cast("str | Sequence[int]", prompt), long=long), RenderedChat(text="")

    def answer_fields(self, chat: RenderedChat, n: int) -> dict[str, Any]:
        """Return the fields of a `Request` for the answer to a chat of `n` tokens."""
        forgotten = len(self.tokenize(chat.answer, start=False, special=True)) if chat.answer else 0
        return {
            "shown": self.shown(chat.shown),
            "thoughts": chat.thoughts,
            "triggers": chat.triggers,
            "boundary": n - forgotten if forgotten else 0,
            "reader": chat.reader,
            "said": self._plain(chat.before.content) if chat.constraint is None else "",
        }

    def prompt(self, prompt: str | Sequence[int], *, start: bool = True, long: bool = False) -> list[int]:
        """Return the tokens of a raw prompt, text or tokens.

        Raises:
            ValueError: a token is not of this model.
        """
        if isinstance(prompt, str):
            return self.tokenize(prompt, start=start, special=True, n_ctx=INT32_MAX if long else None)
        return check_tokens("prompt", prompt, self.n_vocab)

    def mixed(self, parts: Sequence[int | str], *, special: bool = True, long: bool = False) -> list[int]:
        """Return the tokens of a raw prompt of tokens and texts.

        Raises:
            ValueError: as `prompt`.
        """
        if all(isinstance(part, int) for part in parts):
            return check_tokens("prompt", cast("Sequence[int]", parts), self.n_vocab)
        tokens: list[int] = []
        for part in parts:
            if isinstance(part, str):
                n_ctx = INT32_MAX if long else None
                tokens += self.tokenize(part, start=not tokens, special=special, n_ctx=n_ctx)
            else:
                tokens += check_tokens("prompt", [part], self.n_vocab)
        return tokens

    def infill(
        self,
        before: str,
        after: str,
        *,
        beginning: str = "",
        files: Sequence[tuple[str, str]] = (),
        room: int | None = None,
    ) -> list[int]:
        """Return the tokens of a prompt for infilling: the text missing between two others, as llama-server
        writes it.

        Args:
            beginning: of what is missing.
            files: names and texts of other files.
            room: most tokens. Of the two texts those next to what is missing stay, three quarters of the room
                for the one before it, and of the files the last tokens that then fit. None takes all.

        Raises:
            ValueError: the model was not made for infilling, or the texts are too long.
        """
        if not self.infills:
            raise ValueError("this model has no tokens for infilling (FIM): serve one that was made for it")
        prefix, suffix, middle = self._fim
        most = (
            INT32_MAX if room is None or not self._longest else room * self._longest
        )  # characters that can stay
        start, begun = self.tokenize("", start=True), self.tokenize(beginning, start=False)
        first = self.tokenize(before[-most:], start=False)
        last = self.tokenize(after[:most], start=False)
        extra = self._other_files([(name, text[-most:]) for name, text in files])
        if room is not None:
            left = max(0, room - len(start) - len(begun) - 3)
            last = last[: max(left // 4, left - len(first))]
            first = _last(first, left - len(last))
            extra = _last(extra, left - len(last) - len(first))
        return [*start, *extra, prefix, *first, suffix, *last, middle, *begun]

    def _other_files(self, files: Sequence[tuple[str, str]]) -> list[int]:
        """Return the tokens of other files, with the model's token between them or else a line."""
        repository, separator = llama_cpp.llama_vocab_fim_rep(self._vocab), self._fim_file
        tokens = [repository, *self.tokenize("myproject\n", start=False)] if repository >= 0 else []
        for name, text in files:
            if separator >= 0:
                tokens += [separator, *self.tokenize(f"{name}\n", start=False)]
            else:
                tokens += self.tokenize(_SNIPPET, start=False)
            tokens += self.tokenize(text, start=False)
        if separator >= 0:
            tokens += [separator, *self.tokenize("filename\n", start=False)]
        return tokens

    def pair(self, query: str, document: str, *, n_ctx: int) -> list[int]:
        """Return the tokens of a query and a document for a ranking model, joined by the model's own template
        or else as llama-server joins them.

        Raises:
            ContextLengthError, ValueError: as `tokenize`.
        """
        if template := self._llm.metadata.get("tokenizer.chat_template.rerank", ""):
            texts = {"{query}": self._marked(query, template), "{document}": self._marked(document, template)}
            text = re.sub(r"\{query\}|\{document\}", lambda name: texts[name[0]], template)
            return self.tokenize(text, start=False, special=True, n_ctx=n_ctx)
        first, second = (self.tokenize(text, start=False, n_ctx=n_ctx) for text in (query, document))
        vocab, separator = self._vocab, llama_cpp.llama_vocab_sep(self._vocab)
        eos = llama_cpp.llama_vocab_eos(vocab)
        begin = [llama_cpp.llama_vocab_bos(vocab)] if llama_cpp.llama_vocab_get_add_bos(vocab) else []
        end = [eos if eos >= 0 else separator] if llama_cpp.llama_vocab_get_add_eos(vocab) else []
        between = [separator] if llama_cpp.llama_vocab_get_add_sep(vocab) else []
        return [*begin, *first, *end, *between, *second, *end]

    def rendered(self, chat: Chat) -> RenderedChat:
        """Render a chat up to where the answer begins: with llama.cpp's chat layer if there are tools or
        thoughts, otherwise with the template alone. Control tokens in what the chat holds are marked.

        Raises:
            ValueError: the model has no chat template, or it refuses the messages.
        """
        chat = chat.begun
        if self._llm.content_marks is None:
            return self._rendered(chat)
        try:
            return self._rendered_with_marks(self._llm.content_marks, chat)
        except ValueError as error:
            if (said := self._plain(str(error))) == str(error):
                raise
            raise ValueError(said) from None

    def _rendered_with_marks(self, marks: ContentMarks, chat: Chat) -> RenderedChat:
        rendered = self._rendered_marked(marks, chat, ())
        if sought := marks.sought(chat.messages, self._cuts):
            left = self._rendered_marked(
                marks, chat, sought
            )  # tags of thoughts: does the template cut them all?
            if marks.count(left.text, sought) == marks.count(rendered.text, sought):
                rendered = left
        plain = marks.plain(rendered.text)
        return rendered if plain == rendered.text else replace(rendered, text=plain, marked=rendered.text)

    def _rendered_marked(self, marks: ContentMarks, chat: Chat, leave: Sequence[str]) -> RenderedChat:
        messages = marks.messages(chat.messages, self._cuts, leave=leave)
        variables = marks.mark(chat.options.variables, self._cuts)
        marked = replace(chat, messages=messages, options=replace(chat.options, variables=variables))
        rendered = self._rendered(marked)
        tools = marks.mark(chat.tools, self._cuts)
        if tools is chat.tools:
            return rendered
        # calls are constrained and read by the names that the tools have
        return replace(rendered, text=self._rendered(replace(marked, tools=tools)).text)

    def _marked(self, text: str, template: str) -> str:
        marks = self._llm.content_marks
        return text if marks is None else marks.mark(text, template)

    def _rendered(self, chat: Chat) -> RenderedChat:
        if chat.has_tools and self.renders and not self._renderer.takes_tools:
            return generic_tools.render(chat, self._rendered)
        if chat.options.continues and self.renders and not self.chat_template:
            raise ValueError("continue_final_message: a chat format by name begins each answer: leave it out")
        if self.chat_template and (self.thinks or not chat.is_plain):
            rendered = self._renderer.render(chat.messages, chat.tools, chat.choice, chat.options)
            if not chat.tools or chat.choice.mode != "auto" or rendered.prompt is None:
                return rendered
            names = {tool["function"]["name"] for tool in chat.tools}
            return replace(rendered, prompt=BareCalls(rendered.prompt, names))
        try:
            result = self._format(chat.messages)
        except ValueError:
            if self.chat_template:  # Python's Jinja says None where llama.cpp's says nothing
                with suppress(ValueError):
                    return self._renderer.render(chat.messages, chat.tools, chat.choice, chat.options)
            raise
        stops = [result.stop] if isinstance(result.stop, str) else list(result.stop or ())
        return RenderedChat(
            text=str(result.prompt),
            stops=tuple(stop for stop in stops if stop and stop != self._eos),
        )

    def render(self, chat: Chat, *, start: bool = True, long: bool = False) -> tuple[list[int], RenderedChat]:
        """Return the tokens of a chat up to where the answer begins, and the `RenderedChat`.

        Args:
            start: it begins a sequence: with BOS, which many templates leave to the vocabulary.

        Raises:
            ValueError: as `rendered`, or the chat is too long.
        """
        rendered = self.rendered(chat)
        tokens = self.with_images(rendered.marked or rendered.text, chat.images, start=False, long=long)
        return _llama_cpp.with_bos(self._vocab, tokens) if start else tokens, rendered

    def _format(self, messages: Messages) -> Any:
        if self._formatter is None:
            raise ValueError(
                "this is a base model: it continues texts and is not tuned for chat. Send a text to "
                "/v1/completions or /api/generate, or serve it with --chat-format chatml to chat all the same"
            )
        try:
            return self._formatter(messages=list(messages), **_dates())
        except Exception as error:  # templates are programs of the model's file
            raise ValueError(f"messages: the model's chat template refuses them: {error}") from None

    @property
    def renders(self) -> bool:
        """True if there is a chat template or format; one that shows no tools gets `generic_tools`."""
        return self._formatter is not None

    def can_continue(self, tools: bool) -> bool:
        """Return whether an answer can go on from the chat's last message.

        Args:
            tools: the answer may call.
        """
        return bool(self.chat_template) and (not tools or self._renderer.takes_tools)

    @property
    def infills(self) -> bool:
        """True if the model has the tokens that `infill` needs."""
        return all(token >= 0 for token in self._fim)

    @property
    def thinks(self) -> bool:
        """True if the model thinks: its chats are then always rendered and read by llama.cpp's chat layer."""
        return self._renderer.thinks

    def with_images(self, text: str, images: Sequence[Insert], *, start: bool, long: bool) -> list[int]:
        """Return the tokens of a text that has `MARK` in the place of each image.

        Raises:
            ValueError: it has more places or fewer.
        """
        if not images:
            return self.prompt(text, start=start, long=long)
        first, *others = text.split(MARK)
        if len(others) != len(images):
            raise ValueError(f"messages: of {len(images)} images the prompt shows {len(others)}")
        tokens = self.prompt(first, start=start, long=long)
        for image, part in zip(images, others, strict=True):
            tokens += [*image.tokens, *self.prompt(part, start=False, long=long)]
        return tokens

    def thought(self, tags: ThoughtTags, budget: int | None = None) -> Thought:
        """Return the `Thought` of one answer."""
        opening = self.tokenize(tags.start, start=False, special=True)
        close = self.tokenize(tags.ends[0], start=False, special=True)
        return Thought(tags, close=close, opening=opening[0] if len(opening) == 1 else -1, budget=budget)

    def shown(self, names: Sequence[str]) -> tuple[int, ...]:
        """Return the control tokens by their names, without those that end an answer."""
        return self._constraints.shown(names) if names else ()

    def matcher(self, constraint: Constraint) -> Matcher:
        """Return the matcher of a constraint for this model.

        Raises:
            ValueError: the constraint cannot be read, or this model cannot follow it.
        """
        return self._constraints.compile(constraint)

    def sampler(self, sampling: Sampling, matcher: Matcher | None = None, *, keeps: bool = False) -> Sampler:
        """Make the sampler of one answer.

        Args:
            matcher: matcher of `sampling.constraint`, if it was compiled already; it is copied.
            keeps: it tells what a choice was made from.

        Raises:
            ValueError: a token of logit_bias is not of this model, or the constraint cannot be followed.
        """
        check_tokens("logit_bias", [token for token, _ in sampling.logit_bias], self.n_vocab)
        if matcher is not None:
            matcher = matcher.copy()
        elif sampling.constraint is not None:
            matcher = self.matcher(sampling.constraint)
        return Sampler(self._vocab, sampling, self.n_ctx, matcher, keeps=keeps)


def _last(tokens: list[int], n: int) -> list[int]:
    return tokens[len(tokens) - min(n, len(tokens)) :]


def _dates() -> dict[str, str]:
    """Return the variables that llama.cpp gives to each template: today's date, as two families want it."""
    today = datetime.now()
    return {"date_string": today.strftime("%d %b %Y"), "datetime": today.strftime("%b %d %Y")}


def _make_formatter(chat_format: str, template: str, bos: str, eos: str) -> Any:
    if chat_format:
        return chat_formatter(chat_format)
    if not template:
        return None
    if error := syntax_error(template):
        raise ValueError(f"chat_template: it does not parse: {error}")
    return llama_chat_format.Jinja2ChatFormatter(template=template, eos_token=eos, bos_token=bos)
