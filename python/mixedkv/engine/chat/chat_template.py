"""Renders chats and reads answers with llama.cpp's chat layer, which knows how each family of models is told
of tools and how it writes calls and thoughts.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, TimeoutError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Protocol, TypeVar

from mixedkv import _chat
from mixedkv.constrain.constraint import SPACE
from mixedkv.constrain.constraint_text import Constraint
from mixedkv.constrain.tool_grammar import tool_grammar
from mixedkv.engine.text.answer_reader import AnswerReader, ReadAnswer
from mixedkv.engine.text.thought import ThoughtTags
from mixedkv.native.templates import lexed
from mixedkv.prompts.part import GivenPart, Insert

_T = TypeVar("_T")
_PROBE_SECONDS = 10.0  # a template takes milliseconds
_MAX_TEMPLATE = 1 << 16  # characters: llama.cpp parses a chain of filters by recursion
# llama.cpp's grammar of a call takes the square of an object's properties and of the length of their names
_MAX_SCHEMA = 1 << 16  # characters of a tool's parameters
_MAX_PROPERTIES, _MAX_NAMES = 256, 1 << 14  # of one object, and characters of their names
_MAX_ALL = 4096  # properties of all tools together
# printed, or joined to a text: `{{ call.arguments }}`, `'{"arguments": ' + call.arguments`
_ARGUMENTS_AS_TEXT = re.compile(
    r"(\{\{-?\s*|[+~]\s*)((?:\w+\.)*\w+(?:\.arguments|\[['\"]arguments['\"]\]))(?!\s*[|(\w.\[])"
)
_PROBE = "a_name_that_no_template_has"
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, kw_only=True)
class ToolChoice:
    """Restricts what the answer may be: text, calls, or both.

    Attributes:
        mode: "none" only text, "auto" the model's choice, "required" at least one call.
        name: the only function to call; with "required".
        parallel: more than one call is allowed; None: where the template has calls.
    """

    mode: str = "auto"
    name: str = ""
    parallel: bool | None = None

    @property
    def several(self) -> bool:
        """True if a template that has calls may have more than one."""
        return self.parallel is not False


@dataclass(frozen=True, kw_only=True)
class TemplateOptions:
    """Options that a chat gives to its template.

    Attributes:
        variables: variables of the template: JSON values by name.
        thinking: the model may think first, if it can.
        continues: the last message is the beginning of the answer.
    """

    variables: Mapping[str, Any] = field(default_factory=dict)
    thinking: bool = True
    continues: bool = False


NOTHING_SAID = TemplateOptions()


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """A chat to answer.

    Attributes:
        messages, tools: in OpenAI's form; each image stands in its message as `prompts.part.MARK`.
        images: of the messages, in order.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    options: TemplateOptions = NOTHING_SAID
    images: Sequence[Insert] = ()

    @property
    def parts(self) -> list[GivenPart]:
        """The parts of the prompt that are no tokens."""
        return [part for image in self.images for part in image.parts]

    @property
    def begun(self) -> Chat:
        """The chat to render. An answer that is to be continued but has no text yet is left out: with it the
        template would not write the assistant's header.
        """
        said = self.messages[-1] if self.options.continues and self.messages else None
        if said is None or any(said.get(name) for name in ("content", "reasoning_content", "tool_calls")):
            return self
        return replace(self, messages=self.messages[:-1], options=replace(self.options, continues=False))

    @property
    def has_tools(self) -> bool:
        """True if the chat has tools, calls or results."""
        calls = (message.get("role") == "tool" or message.get("tool_calls") for message in self.messages)
        return bool(self.tools) or any(calls)

    @property
    def is_plain(self) -> bool:
        """True if the chat has no tools, calls or results, and no options for the template."""
        return not self.has_tools and self.options == NOTHING_SAID


class Parser(Protocol):
    """Reads answers, as `_chat.ChatPrompt` does."""

    def parse(self, answer: str, partial: bool) -> str: ...


@dataclass(frozen=True, kw_only=True)
class RenderedChat:
    """A rendered chat: the prompt, and how its answer is constrained and read.

    Attributes:
        marked: `text` with marks where messages hold control tokens (`ContentMarks`); "" if they hold none.
        constraint: constraint of an answer that must be a call, or of a call in it.
        triggers: words that begin an optional call; empty if a call is required.
        stops: strings that end the answer.
        shown: control tokens that are part of the answer's text.
        thoughts: None for a model that does not think.
        answer: the end of `text` that prompts of later turns will not have, since templates leave out
            thoughts.
        before: the beginning of the answer, if the chat gave it.
        prompt: reads the answer; None for an answer that is text only.
    """

    text: str
    marked: str = ""
    constraint: Constraint | None = None
    triggers: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    thoughts: ThoughtTags | None = None
    answer: str = ""
    before: ReadAnswer = field(default_factory=ReadAnswer)
    prompt: Parser | None = None
    parallel: bool = True

    def reader(self) -> AnswerReader:
        """Return a reader for one answer."""
        parse = self.prompt.parse if self.prompt is not None else None
        return AnswerReader(parse, parallel=self.parallel, before=self.before)


class ChatRenderer:
    """A model's chat template.

    Args:
        source: its Jinja text; "" for none.
    """

    def __init__(self, source: str, bos: str, eos: str) -> None:
        self._source, self._bos, self._eos = source, bos, eos

    @cached_property
    def thinks(self) -> bool:
        """True if the model's template handles thoughts."""
        try:
            user = [{"role": "user", "content": "?"}]
            return _tags(_in_time(lambda: self._apply(user, [], ToolChoice()))) is not None
        except SlowTemplateError:
            raise
        except ValueError:
            return False

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        choice: ToolChoice,
        options: TemplateOptions = NOTHING_SAID,
    ) -> RenderedChat:
        """Render messages and tools with the template.

        Args:
            messages, tools: in OpenAI's form; none of tools if the template does not take them.

        Raises:
            ValueError: the template refuses the messages; the message begins with the field.
        """
        check_sizes(tools)
        must = choice.mode == "required"
        if must:
            options = replace(options, thinking=False)
        prompt = self._apply(messages, tools, choice, options)
        reading, constraint = prompt, None
        if must:
            callable_ = [tool for tool in tools if choice.name in ("", tool["function"]["name"])]
            reading = self._apply(messages, callable_, choice, options)
            constraint = _calls_only(reading, callable_, choice.several)
        elif tools and choice.mode == "none":
            reading = self._apply(messages, [], choice, options)
        elif tools and prompt.triggers:
            with suppress(ValueError):  # calls are the model's choice: unconstrained rather than refused
                constraint = _calls_only(prompt, tools, choice.several)
        thoughts = _tags(prompt)
        tags = (thoughts.start, *thoughts.ends) if thoughts is not None else ()
        return RenderedChat(
            text=prompt.prompt,
            constraint=constraint,
            triggers=tuple(prompt.triggers) if constraint is not None else (),
            stops=tuple(reading.stops),
            shown=(*(reading.preserved if tools or thoughts else ()), *tags),
            thoughts=None if must else thoughts,
            answer=_forgotten(prompt, thoughts),
            before=_said(messages[-1]) if options.continues else ReadAnswer(),
            prompt=reading,
            parallel=choice.several,
        )

    @cached_property
    def _template(self) -> _chat.ChatTemplate:
        if not self._source:
            raise ValueError("tools: this model has no chat template: serve it with --chat-format chatml")
        if len(self._source) > _MAX_TEMPLATE:
            raise ValueError(f"tools: the model's chat template has more than {_MAX_TEMPLATE} characters")
        return _in_time(self._read)

    def _read(self) -> _chat.ChatTemplate:
        try:
            template = _chat.ChatTemplate(self._source, self._bos, self._eos)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"tools: the model's chat template cannot be read: {_short(error)}") from None
        if not _shows_tools(template) and (source := _with_json_arguments(self._source)) != self._source:
            other = _chat.ChatTemplate(source, self._bos, self._eos)
            return other if _shows_tools(other) else template
        return template

    @cached_property
    def takes_tools(self) -> bool:
        """True if the template shows tools and calls can be parsed."""
        try:
            return _shows_tools(self._template)
        except SlowTemplateError:
            raise
        except ValueError:
            return False

    def _apply(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        choice: ToolChoice,
        options: TemplateOptions = NOTHING_SAID,
    ) -> _chat.ChatPrompt:
        template = self._template
        functions = {"functions": _as_text(tools)} if self._names_functions else {}
        variables = {name: json.dumps(value) for name, value in {**functions, **options.variables}.items()}
        try:
            return template.apply(
                json.dumps(messages),
                json.dumps(tools),
                choice.mode,
                choice.several,
                options.thinking,
                variables,
                options.continues,
            )
        except (RuntimeError, ValueError) as error:  # a template is a program: anything can be raised
            field = "messages"
            if tools:  # find out whether the tools or the messages are to blame
                with suppress(ValueError):
                    self._apply(messages, [], ToolChoice(), options)
                    field = "tools"
            if name := self._odd_tool(tools) if field == "tools" else "":
                raise ValueError(
                    f"tools: the parameters of {name} cannot be followed: {_short(error)}"
                ) from None
            raise ValueError(f"{field}: the model's chat template refuses them: {_short(error)}") from None

    @cached_property
    def _names_functions(self) -> bool:
        """True if the template reads the tools as a text, as Firefunction's does."""
        return any(name == "functions" for _, kind, name in lexed(self._source) if kind == "name")

    def _odd_tool(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Return the name of the tool whose schema of arguments llama.cpp refuses; "" if there is none."""
        for tool in tools:
            function = tool["function"]
            if function.get("parameters") in (None, NO_ARGUMENTS):
                continue
            plain = {**tool, "function": {**function, "parameters": NO_ARGUMENTS}}
            if self._takes(plain) and not self._takes(tool):
                return str(function["name"])
        return ""

    def _takes(self, tool: Mapping[str, Any]) -> bool:
        return _called(self._template, tool) is not None


class SlowTemplateError(ValueError):
    """A chat template takes too long for a chat of one message."""


def _in_time(probe: Callable[[], _T]) -> _T:
    """Return what a probe of a chat template returns.

    Raises:
        SlowTemplateError: it takes too long. Its thread goes on, as nothing can stop it.
    """
    found: Future[_T] = Future()

    def run() -> None:
        try:
            found.set_result(probe())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, name="mixedkv-chat-template", daemon=True).start()
    try:
        return found.result(_PROBE_SECONDS)
    except TimeoutError:
        raise SlowTemplateError(
            f"the model's chat template takes more than {_PROBE_SECONDS:g} seconds for a chat of one "
            "message: use another one (--chat-format FILE, or chatml)"
        ) from None


def _called(template: _chat.ChatTemplate, tool: Mapping[str, Any]) -> _chat.ChatPrompt | None:
    """Return a prompt whose answer must call a tool; None if the template refuses it."""
    user = json.dumps([{"role": "user", "content": "?"}])
    try:
        functions = {"functions": json.dumps(_as_text([tool]))}
        return template.apply(user, json.dumps([tool]), "required", False, False, functions, False)
    except (RuntimeError, ValueError):
        return None


def _as_text(tools: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(tools, indent=2, ensure_ascii=False) if tools else ""


def _shows_tools(template: _chat.ChatTemplate) -> bool:
    """Return whether tools are in the prompt and calls can be parsed. Some families are recognised by name
    only.
    """
    tool = {"type": "function", "function": {"name": _PROBE, "parameters": NO_ARGUMENTS}}
    prompt = _called(template, tool)
    return prompt is not None and _PROBE in prompt.prompt and bool(prompt.grammar)


def _with_json_arguments(source: str) -> str:
    """Return a template that is right for arguments as objects, which llama.cpp's analysis gives it, where it
    was written for arguments as JSON text.
    """
    return _ARGUMENTS_AS_TEXT.sub(r"\1(\2|tojson)", source)


def check_sizes(tools: Sequence[Mapping[str, Any]]) -> None:
    """Refuse tools whose grammar would take seconds.

    Raises:
        ValueError: a schema, or all of them, are too large.
    """
    left = _MAX_ALL
    for tool in tools:
        function = tool["function"]
        parameters = function.get("parameters") or {}
        where = f"tools: the parameters of {function['name']}"
        if (n := len(json.dumps(parameters))) > _MAX_SCHEMA:
            raise ValueError(f"{where} have {n} characters, at most {_MAX_SCHEMA} are taken: use fewer")
        todo: list[Any] = [parameters]
        while todo:
            item = todo.pop()
            todo += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
            properties = item.get("properties") if isinstance(item, dict) else None
            if isinstance(properties, dict):
                left -= len(properties)
                n = sum(map(len, properties))
                if len(properties) > _MAX_PROPERTIES or n > _MAX_NAMES:
                    raise ValueError(
                        f"{where}: an object has {len(properties)} properties with {n} characters in their "
                        f"names, at most {_MAX_PROPERTIES} and {_MAX_NAMES} are taken: use fewer"
                    )
    if left < 0:
        raise ValueError(
            f"tools: their parameters have {_MAX_ALL - left} properties, at most {_MAX_ALL} are taken: give "
            "fewer tools"
        )


_KEPT = 1 << 16  # characters of schemas whose grammars are cached


def _calls_only(prompt: _chat.ChatPrompt, tools: Sequence[Mapping[str, Any]], parallel: bool) -> Constraint:
    """Return the constraint of an answer that must call a tool at once, and end a thought that the template
    began.
    """
    functions = [tool["function"] for tool in tools]
    schemas = {each["name"]: each.get("parameters") or NO_ARGUMENTS for each in functions}
    thoughts = _tags(prompt)
    ends_thought = thoughts is not None and thoughts.open and not prompt.triggers
    first = thoughts.ends[0] if thoughts is not None and ends_thought else ""
    try:
        given = json.dumps(schemas)
        make = _grammar if len(given) < _KEPT else _grammar.__wrapped__
        lark = make(prompt.grammar, prompt.parser, given, first, parallel)
    except ValueError as error:
        raise ValueError(f"tools: {error}") from None
    return Constraint("calls", lark, "tools", tuple(prompt.preserved))


@lru_cache(maxsize=32)  # agents send the same tools every turn, and 20 of them take 15 ms
def _grammar(gbnf: str, parser: str, schemas: str, first: str, parallel: bool) -> str:
    return tool_grammar(gbnf, parser, json.loads(schemas), space=SPACE, first=first, parallel=parallel)


def _tags(prompt: _chat.ChatPrompt) -> ThoughtTags | None:
    start, ends = prompt.thinking_start, tuple(end for end in prompt.thinking_ends if end)
    if not start or not ends:
        return None
    began, ended = prompt.opening.rfind(start), max(prompt.opening.rfind(end) for end in ends)
    return ThoughtTags(start=start, ends=ends, open=began > ended)


def _forgotten(prompt: _chat.ChatPrompt, thoughts: ThoughtTags | None) -> str:
    """Return the part of the prompt's end that begins a thought."""
    at = prompt.opening.find(thoughts.start) if thoughts is not None else -1
    return prompt.opening[at:] if at >= 0 else ""


def _said(message: Mapping[str, Any]) -> ReadAnswer:
    return ReadAnswer(message.get("content") or "", message.get("reasoning_content") or "")


def _short(error: Exception) -> str:
    """Return the last line of llama.cpp's error, which says what is wrong; others quote the template."""
    text = str(error)
    if isinstance(error, UnicodeDecodeError):  # llama.cpp's words, cut within a character
        text = error.object.decode("utf-8", "replace")
    lines = [line for line in text.splitlines() if line.strip("- ")]
    return (lines[-1] if lines else "it fails")[:300]
