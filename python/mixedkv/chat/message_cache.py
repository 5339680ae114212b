"""Continues a chat from the newest message whose KV is still there, without evaluating the history again."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import llama_cpp
from llama_cpp import llama_chat_format

from mixedkv.errors import UnsupportedModelError
from mixedkv.ids import check_id, check_session_id, check_tenant, new_id
from mixedkv.limits import INT32_MAX, whole
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.native.llama_arguments import check_messages, checked_kinds
from mixedkv.start.lone import LoneSequence, PrefixReuse, Source, context_size
from mixedkv.store import Identity, KVStore, Saved

if TYPE_CHECKING:
    from mixedkv.llama import Llama


Message = Mapping[str, Any]
_PICTURES = (llama_chat_format.Llava15ChatHandler, llama_chat_format.MTMDChatHandler)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatUsage:
    """Counts tokens, time and reuse of an answer. `prompt_tokens` is the whole prompt, as OpenAI counts it.

    Args:
        cached_tokens: tokens of the prompt that were not evaluated.
        evaluated_tokens: those that were; the rest had been dropped.
        dropped_tokens: tokens of the conversation that had left the context when the answer was done.
        stored_tokens: tokens newly stored.
        source: where the cached tokens came from: "live" is the cache itself, others are tiers of the store.
        exact: the answer is that of a cache that never left, see `PrefixReuse.exact`.
        matched_message_id: the newest of the given messages whose stored KV the prompt goes on from.
        seconds_to_first_token: from the call to the first sampled token.
        reason: why something stored could not be used, or the answer not be stored.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    evaluated_tokens: int
    dropped_tokens: int
    stored_tokens: int
    source: Source
    exact: bool
    matched_message_id: str | None
    seconds_to_first_token: float
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatResult:
    """An answer.

    Args:
        message: the assistant's message with its `message_id`, to append to the conversation.
        finish_reason: "stop", "length" or "tool_calls".
    """

    message: dict[str, Any]
    finish_reason: str
    usage: ChatUsage

    @property
    def message_id(self) -> str:
        """Id of the assistant's message."""
        return str(self.message["message_id"])

    @property
    def content(self) -> str:
        """Text of the assistant's message."""
        return self.message.get("content") or ""


class MessageCache:
    """Chats on one `Llama` that keep their KV in a `KVStore`.

    Use it on the thread that decodes; others may use the same `Llama` between answers. Messages are
    dictionaries in OpenAI's form; each may carry a `message_id`, of which the answers have one. An id is an
    alias: what is reused is decided by the tokens of the rendered prompt, so wrong ids, edited, moved or
    deleted messages cost time at most.

    Args:
        llm: the model, with its own chat format.
        store: where KV is kept.
        tenant: whose; nobody else's KV is found.
        session: what the KV goes away with, e.g. `CacheSessionMetadata.kv_cache_ref`.
        attention_sink_tokens: when a conversation outgrows the context, this many first tokens stay with the
            latest, and the middle is dropped. None raises ValueError instead.
        exact_only: reuse only what goes on exactly as if it had never left, see `PrefixReuse.exact`.

    Raises:
        UnsupportedModelError: the model takes pictures.
        ValueError: a setting is wrong.
    """

    def __init__(
        self,
        llm: Llama,
        store: KVStore,
        *,
        tenant: str = "",
        session: str | None = None,
        attention_sink_tokens: int | None = 4,
        exact_only: bool = False,
    ) -> None:
        if isinstance(llm.chat_handler, _PICTURES):
            raise UnsupportedModelError(
                "chats with images are not cached, since tokens do not tell images apart: use "
                "create_chat_completion"
            )
        self._llm = llm
        self._store = store
        self._tenant = check_tenant(tenant)
        self._session = None if session is None else check_session_id(session)
        self._sinks = _check_sinks(attention_sink_tokens, context_size(llm))
        self._exact_only = exact_only
        self._made: set[str] = set()  # ids of answers, which are known though their entries were evicted

    def __enter__(self) -> MessageCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing: the `Llama` and the store are yours."""

    def chat(
        self, messages: Sequence[Message], *, message_id: str | None = None, **options: Any
    ) -> ChatResult:
        """Answer a conversation, evaluating only what is new of it, and store the result.

        Args:
            messages: from the first to the newest.
            message_id: the answer's; None makes one.
            **options: as in `llama_cpp.Llama.create_chat_completion`: max_tokens, temperature, stop, tools.

        Raises:
            ValueError: messages or an id are malformed, the prompt does not fit, or the model's file is not
                the one that was loaded.
            UnsupportedModelError: the prompt does not fit, and the memory cannot drop tokens.
        """
        answer = self._start(messages, message_id, options, stream=False)
        for _ in answer:
            pass
        assert answer.result is not None
        return answer.result

    def stream(
        self, messages: Sequence[Message], *, message_id: str | None = None, **options: Any
    ) -> ChatStream:
        """Answer as `chat` does, in pieces: iterate for chunks as `create_chat_completion(stream=True)`
        yields them.

        The first chunk's delta has the `message_id`. After the last one `result` is there; one that is closed
        before stores what was computed up to then.
        """
        return self._start(messages, message_id, options, stream=True)

    def forget(self, message_id: str) -> bool:
        """Remove the KV of an answer wherever it is stored, and all that builds on it; False if none is.

        What is live in the cache stays until it is overwritten.
        """
        check_id("message_id", message_id)
        return self._store.messages.remove(message_id, self._tenant) > 0

    def _start(
        self, messages: Sequence[Message], message_id: str | None, options: dict[str, Any], stream: bool
    ) -> ChatStream:
        if "stream" in options:
            raise ValueError("stream is not an option: call chat or stream")
        plain, ids = _check_messages(messages)
        new = new_id("msg") if message_id is None else check_id("message_id", message_id)
        sinks = None if options.get("logprobs") else self._sinks  # llama_cpp reads logits by position
        return ChatStream(self, plain, ids, new, sinks, {**checked_kinds(options), "stream": stream})

    def _save(self, identity: Identity) -> Saved:
        """Store what was computed. An error is noted, not raised, since the answer is there."""
        try:
            return self._store.save(self._llm, identity=identity, session=self._session)
        except (LookupError, ValueError, OSError) as error:
            return Saved(entry="", n_tokens=0, n_stored=0, nbytes=0, seconds=0, reason=str(error))

    def _note(self, identity: Identity, ids: Sequence[str], n_prompt: int, new: str | None, n: int) -> None:
        """Note which entries of the first `n` tokens hold messages: known ones of the prompt, whose own
        entries were evicted or whose history was edited, and a new one that ends there. Where in the prompt a
        known one ends is not known: not behind its end.
        """
        known = self._store.messages
        ends = [
            (name, min(n_prompt, n))
            for name in ids
            if name in self._made or known.entries(self._tenant, name)
        ]
        if new is not None:
            self._made.add(new)
            ends.append((new, n))
        match = self._store.find(identity, self._llm.input_ids[:n], remote=False) if ends else None
        if match is not None:
            known.note(match, ends)

    def _matched(self, ids: Sequence[str], reused: PrefixReuse) -> str | None:
        """Return the newest message whose stored end lies within what was reused; the store has compared
        tokens.
        """
        if reused.match is None:
            return None
        ends = {link.entry: min(link.end, reused.n_tokens) for link in reused.match.links}
        with suppress(OSError):
            for message_id in reversed(ids):
                infos = self._store.messages.entries(self._tenant, message_id)
                if any(info.n_tokens <= ends.get(info.entry, -1) for info in infos):
                    return message_id
        return None


class ChatStream:
    """Chunks of an answer, and the `result` after the last of them."""

    def __init__(
        self,
        cache: MessageCache,
        messages: list[dict[str, Any]],
        ids: list[str],
        message_id: str,
        sinks: int | None,
        options: dict[str, Any],
    ) -> None:
        self.message_id = message_id
        self.result: ChatResult | None = None
        self._cache, self._ids = cache, ids
        self._n_stored, self._reason = 0, ""
        self._chunks = self._run(messages, sinks, options)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        return next(self._chunks)

    def __enter__(self) -> ChatStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop here. What was computed is stored."""
        self._chunks.close()

    def _run(self, messages: list[dict[str, Any]], sinks: int | None, options: dict[str, Any]) -> Any:
        begin = time.perf_counter()
        cache, llm = self._cache, self._cache._llm
        identity = Identity.of(llm, tenant=cache._tenant)
        sequence = LoneSequence(
            llm,
            cache._store,
            identity,
            "chat",
            untouched=True,
            sinks=sinks,
            before_drop=lambda: self._save(identity, turn),
        )

        def keep() -> None:
            if not sequence.mine:
                self._reason = "another answer was begun before this one was through"
            elif not sequence.n_dropped:
                self._save(identity, turn)

        turn = ChatTurn(llm, sequence, cache._exact_only, keep, begin)
        marked, options = llm.marked_chat(messages, options)
        answer: Any = turn.create_chat_completion(marked, **options)
        collected = _Chunks()
        try:
            for chunk in answer if options["stream"] else [answer]:
                collected.add(chunk, self.message_id)
                yield chunk
        finally:
            if options["stream"]:
                answer.close()
            if turn.reused is not None:
                keep()
                self.result = self._finish(turn, sequence, collected)
                sequence.leave()

    def _save(self, identity: Identity, turn: ChatTurn) -> None:
        cache, saved = self._cache, self._cache._save(identity)
        self._n_stored += saved.n_stored
        self._reason = saved.reason
        try:
            is_new = saved.entry and turn.reused is not None and saved.n_tokens > turn.n_prompt
            new, ids = self.message_id if is_new else None, self._ids if saved.n_stored else []
            cache._note(identity, ids, turn.n_prompt or saved.n_tokens, new, saved.n_tokens)
        except OSError as error:
            self._reason = str(error)

    def _finish(self, turn: ChatTurn, sequence: LoneSequence, collected: _Chunks) -> ChatResult:
        reused = turn.reused
        assert reused is not None
        usage = ChatUsage(
            prompt_tokens=turn.n_prompt,
            completion_tokens=turn.n_generated,
            cached_tokens=reused.n_tokens,
            evaluated_tokens=turn.n_evaluated,
            dropped_tokens=sequence.n_dropped,
            stored_tokens=self._n_stored,
            source=reused.source,
            exact=reused.exact and not sequence.n_dropped,
            matched_message_id=self._cache._matched(self._ids, reused),
            seconds_to_first_token=turn.seconds_to_first_token,
            reason=self._reason or reused.reason,
        )
        message = {**collected.message, "message_id": self.message_id}
        return ChatResult(message=message, finish_reason=collected.finish_reason, usage=usage)


class _Chunks:
    """An assistant message put together from chunks, or from the one whole answer."""

    def __init__(self) -> None:
        self.message: dict[str, Any] = {"role": "assistant", "content": ""}
        self.finish_reason = ""

    def add(self, chunk: dict[str, Any], message_id: str) -> None:
        choice = chunk["choices"][0]
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if "message" in choice:
            self.message = dict(choice["message"])
            choice["message"]["message_id"] = message_id
            return
        delta = choice["delta"]
        self.message["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls") or []:
            self._add_call(call)
        if delta.get("role"):
            delta["message_id"] = message_id

    def _add_call(self, part: dict[str, Any]) -> None:
        calls = self.message.setdefault("tool_calls", [])
        known = [call for call in calls if call["id"] == part["id"]]
        if known:
            known[0]["function"]["arguments"] += part["function"].get("arguments") or ""
        else:
            calls.append({"id": part["id"], "type": "function", "function": dict(part["function"])})


def _check_messages(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the messages as templates know them, and their ids in order."""
    check_messages(messages)
    plain, ids = [], []
    for i, message in enumerate(messages):
        if message.get("message_id") is not None:
            ids.append(check_id(f"messages[{i}].message_id", message["message_id"]))
        plain.append({key: value for key, value in message.items() if key != "message_id"})
    return plain, ids


def _check_sinks(value: int | None, size: int) -> int | None:
    """Return how many tokens stay: at most half of the context."""
    return None if value is None else whole("attention_sink_tokens", value, 0, size // 2)


if TYPE_CHECKING:
    from mixedkv.llama import Llama


class ChatTurn(_llama_cpp.Completions):
    """Stands in for the `Llama` while an answer is made: chat formatters, tools, grammars, stop strings and
    chunks are llama-cpp-python's, and so are all attributes, but what evaluates and samples tokens
    (`generate`) is here.

    Args:
        llm: the model.
        sequence: its sequence 0.
        exact_only: reuse only what goes on exactly.
        keep: called when the first token of an answer is out and the cache still ends with the prompt.
        begin: when the answer was asked for, of time.perf_counter.
    """

    def __init__(
        self,
        llm: Llama,
        sequence: LoneSequence,
        exact_only: bool,
        keep: Callable[[], None],
        begin: float,
    ) -> None:
        super().__init__(llm)
        self._llm: Llama = llm
        self._sequence, self._exact_only = sequence, exact_only
        self._keep = keep
        self._begin = begin
        self.reused: PrefixReuse | None = None
        self.n_prompt = self.n_evaluated = self.n_generated = 0
        self.seconds_to_first_token = 0.0

    @property
    def n_tokens_max(self) -> int:
        """No limit where old tokens make room."""
        return self._sequence.size if self._sequence.sinks is None else INT32_MAX

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Tokenize as the `Llama` does. A prompt begins with BOS where the vocabulary asks for it, also if
        the template leaves it out, as in the chats of an engine.
        """
        tokens = self._llm.tokenize(text, add_bos, special)
        return _llama_cpp.with_bos(_llama_cpp.vocab(self._llm), tokens) if special else tokens

    def create_completion(self, prompt: Any, *, max_tokens: int | None = 16, **options: Any) -> Any:
        if max_tokens is None or max_tokens <= 0:
            max_tokens = max(self._sequence.size - len(prompt), self._sequence.size // 4)
        return super().create_completion(prompt, max_tokens=max_tokens, **options)

    def generate(
        self,
        tokens: Sequence[int],
        *,
        stopping_criteria: Callable[[Any, Any], bool] | None = None,
        **sampling: Any,
    ) -> Generator[int, None, None]:
        """Generate as `llama_cpp.Llama.generate` does, without draft models."""
        return self._llm.in_turns(self._steps(tokens, stopping_criteria, sampling))

    def _steps(
        self,
        tokens: Sequence[int],
        stopping_criteria: Callable[[Any, Any], bool] | None,
        sampling: dict[str, Any],
    ) -> Generator[int, None, None]:
        llm = self._llm
        _llama_cpp.begin_sampling(llm, **sampling)
        self._evaluate(list(tokens))
        first = True
        while True:
            token = llm.sample()
            if not self.seconds_to_first_token:
                self.seconds_to_first_token = time.perf_counter() - self._begin
            if stopping_criteria is not None:
                n = llm.n_tokens
                if stopping_criteria(llm.input_ids[:n], llm.scores[:n][-1, :]):
                    return
            self.n_generated += not llama_cpp.llama_vocab_is_eog(_llama_cpp.vocab(llm), token)
            yield token
            if first:
                self._keep()
            first = False
            self._sequence.eval([token])

    def _evaluate(self, tokens: list[int]) -> None:
        reused, n_evaluated = self._sequence.prefill(tokens, exact_only=self._exact_only)
        self.n_evaluated += n_evaluated
        if self.reused is None:  # a handler may ask for several completions; the first has the prompt
            self.reused, self.n_prompt = reused, len(tokens)
