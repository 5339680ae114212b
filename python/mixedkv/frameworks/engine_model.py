"""Common to all frameworks: a chat model's settings, the engine it runs on, and how it asks."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from mixedkv.bundled import model_path
from mixedkv.chunks import Reuse
from mixedkv.engine import Answer, Chat, Engine, PromptCache, ToolChoice
from mixedkv.engine.chat.chat_template import check_depth
from mixedkv.engine.chat.tokenizer import Tokenizer
from mixedkv.engine.constrain.constraint_text import Constraint
from mixedkv.engine.sample.sampling_defaults import sampling_defaults
from mixedkv.llama import Llama
from mixedkv.model.gguf_file import default_n_ctx, read_model_file
from mixedkv.model.named_model import find_model, is_name
from mixedkv.store import KVStore

if TYPE_CHECKING:
    from typing_extensions import Self

_BUNDLED = "bundled"
_MAX_QUEUE = 1 << 16  # answers: a batch may be long, and nobody else waits
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")

CONFIG = ConfigDict(arbitrary_types_allowed=True, extra="forbid", protected_namespaces=())


class EngineModel(BaseModel):
    """Settings of a chat model, and the engine that it opens with them.

    The first model object opens the engine; copies of it share the engine, and closing one closes it for all.
    An engine that nobody refers to any more is closed too.

    Attributes:
        model: a GGUF file, or a name as `-m` takes it: "bundled", "smollm2", "hf:OWNER/REPO:FILE".
        kv: the cache, as in `mixedkv run`.
        n_ctx: tokens of the cache, for all answers together; None is 8,192, or what the
            model was trained with.
        parallel: answers at a time; as many finished conversations stay in the context.
        store: a folder in which KV is kept, also for other processes, or a `KVStore`, which is closed with
            the engine. None keeps KV in the context only.
        reuse: "chunks" also reuses passages that were computed elsewhere, "prefix" any common beginning.
        chat_template: Jinja text in place of the model's own.
        llama_options: other arguments of `Llama`: n_threads, lora_path, ...
        engine: run on this one, and ignore all of the above; it is not closed.
        max_tokens: of an answer; None is what the context has room for.
        temperature, top_p, top_k, min_p: None is what the model recommends, else as llama-server does.
        seed: of the random choice; None is another one for each answer.
        stop: strings that end an answer, where a call does not say.
        parallel_tool_calls: an answer may have several calls, where a call does not say.
        timeout: seconds from the question to the answer's end, after which it is a TimeoutError.
        options: other arguments of `Engine.submit`, and fields of `Sampling`: {"overflow": "slide"}.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a setting is wrong, see `Llama` and `Engine`.
    """

    model_config = CONFIG

    model: str = _BUNDLED
    kv: str = "mixed"
    n_ctx: int | None = Field(default=None, ge=1)
    parallel: int = Field(default=4, ge=1)
    store: str | Path | KVStore | None = Field(default=None, exclude=True)
    reuse: Reuse = "exact"
    chat_template: str = Field(default="", repr=False)
    llama_options: dict[str, Any] = Field(default_factory=dict)
    engine: Engine | None = Field(default=None, exclude=True, repr=False)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = None
    stop: list[str] | None = None
    parallel_tool_calls: bool = True
    timeout: float | None = Field(default=None, gt=0)
    options: dict[str, Any] = Field(default_factory=dict)
    _opened: _Opened | None = PrivateAttr(None)
    _closes: bool = PrivateAttr(False)

    @model_validator(mode="after")
    def _open(self) -> Self:
        if self.engine is None:
            self._opened, self._closes = _Opened(self), True
            self.engine = self._opened.cache.engine
            _OPENED[id(self.engine)] = self._opened
        else:
            self._opened = _OPENED.get(id(self.engine))  # not forgotten while this one uses it
            if "model" not in self.model_fields_set:
                self.model = Path(self.engine.llm.model_path).stem
        return self

    def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | bool | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Answer:
        """Submit a chat in OpenAI's form to the engine; returns at once.

        Raises:
            ValueError: a setting is wrong, the prompt is too long, or the model's template has no tools.
            ClosedError: the model was closed.
        """
        _check_depths(messages, tools)
        parallel = self.parallel_tool_calls if parallel_tool_calls is None else parallel_tool_calls
        choice = _choice(tool_choice, parallel) if tools else ToolChoice()
        if (constraint := _constraint(response_format)) is not None:
            if tools and choice.mode != "none":
                raise ValueError("response_format and tools both say what the answer is: leave one out")
            options["constraint"] = constraint
        return self.submit(Chat(messages=messages, tools=tools, choice=choice), **options)

    def submit(self, prompt: str | Chat, **options: Any) -> Answer:
        """Submit a text or a chat with the settings of this model, which `options` changes.

        Raises:
            ValueError, ClosedError: as `ask`.
        """
        assert self.engine is not None
        own = {name: getattr(self, name) for name in (*_SAMPLING, "stop")}
        given = {**sampling_defaults(self.engine.llm.metadata), "max_tokens": self.engine.n_ctx}
        for settings in (self.options, own, options):
            given.update({name: value for name, value in settings.items() if value is not None})
        given["seed"] = given.get("seed", secrets.randbits(32)) % 2**32
        if isinstance(bias := given.get("logit_bias"), Mapping):
            given["logit_bias"] = tuple((int(token), value) for token, value in bias.items())
        return self.engine.submit(prompt, **given)

    async def aask(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Answer:
        """Submit as `ask` does, on another thread: long texts and schemas take time."""
        asking = asyncio.ensure_future(asyncio.to_thread(self.ask, messages, **options))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(_cancel)
            raise

    @contextmanager
    def waiting(self, answer: Answer) -> Iterator[None]:
        """Give an answer up at the end of the block, and after `timeout`."""
        late = TimeoutError(f"the answer has not ended after {self.timeout} seconds")
        timer = threading.Timer(self.timeout or 0, answer.cancel, [late])
        timer.daemon = True
        if self.timeout is not None:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()
            answer.cancel()

    def close(self) -> None:
        """Close the engine, unless it was given: running answers are cancelled, waiting KV is stored."""
        if self._opened is not None and self._closes:
            self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self.model_copy()  # one model in memory


class _Opened:
    """A `Llama` and the engine on it, closed together."""

    def __init__(self, given: EngineModel) -> None:
        path = given.model
        if path == _BUNDLED:
            path = str(model_path())
        elif is_name(path):
            path = str(find_model(path))
        n_ctx = given.n_ctx or default_n_ctx(read_model_file(path))
        fixed: dict[str, Any] = {"n_ctx": n_ctx, "n_seq_max": 2 * given.parallel, "kv_unified": True}
        llm = Llama(path, kv=given.kv, **{"verbose": False, **given.llama_options, **fixed})
        try:
            store = KVStore(given.store) if isinstance(given.store, str | os.PathLike) else given.store
            self.cache = PromptCache(
                llm,
                store,
                reuse=given.reuse,
                parallel=given.parallel,
                max_queue=_MAX_QUEUE,
                tokenizer=Tokenizer(llm, chat_template=given.chat_template),
            )
        except BaseException:
            llm.close()
            raise
        self._llm = llm
        # The garbage collector may run on the engine's own thread, which cannot wait for its own end. At the
        # program's end the engine closes itself.
        closing = threading.Thread(target=_close, args=(self.cache, llm), name="mixedkv-close")
        self._forgotten = weakref.finalize(self, closing.start)
        self._forgotten.atexit = False

    def close(self) -> None:
        self._forgotten.detach()
        _close(self.cache, self._llm)


_OPENED: weakref.WeakValueDictionary[int, _Opened] = weakref.WeakValueDictionary()  # by the engine's id


def _close(cache: PromptCache, llm: Llama) -> None:
    cache.close()
    llm.close()


def _cancel(asking: asyncio.Future[Answer]) -> None:
    if not asking.cancelled() and asking.exception() is None:
        asking.result().cancel()


def _check_depths(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> None:
    """Refuse what templates cannot go through."""
    for tool in tools:
        check_depth(tool, "tools")
    for call in (call for message in messages for call in message.get("tool_calls") or ()):
        try:
            arguments = json.loads(call["function"]["arguments"])
        except (RecursionError, ValueError):
            name = call["function"]["name"]
            raise ValueError(
                f"messages: the arguments of a call of {name} are not JSON: leave out a call that was cut off"
            ) from None
        check_depth(arguments, "messages")


def _choice(wanted: str | bool | Mapping[str, Any] | None, parallel: bool) -> ToolChoice:
    if isinstance(wanted, Mapping):
        wanted = str(wanted["function"]["name"])
    elif wanted in (None, False):
        wanted = "auto"
    elif wanted in (True, "any"):
        wanted = "required"
    if wanted in ("auto", "none", "required"):
        return ToolChoice(mode=str(wanted), parallel=parallel)
    return ToolChoice(mode="required", name=str(wanted), parallel=False)


def _constraint(wanted: Mapping[str, Any] | None) -> Constraint | None:
    if wanted is None or wanted.get("type") == "text":
        return None
    if wanted.get("type") not in ("json_object", "json_schema"):
        raise ValueError(
            f"response_format: {wanted!r} is not a format: use type json_schema, json_object or text"
        )
    schema = wanted.get("json_schema", {}).get("schema", {"type": "object"})
    return Constraint("json_schema", json.dumps(schema), "response_format")
