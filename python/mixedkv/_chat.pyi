"""llama.cpp's chat templates, and its parsers of what families of models answer: cpp/chat/chat_module.cpp.

Messages, tools and read answers are JSON in OpenAI's form. What a template or an answer does wrong is a
RuntimeError or a ValueError.
"""

class ChatPrompt:
    """A rendered chat; any number of threads may use it."""

    @property
    def prompt(self) -> str: ...
    @property
    def opening(self) -> str:
        """The end of `prompt`, which begins the answer."""

    @property
    def grammar(self) -> str:
        """GBNF of the answer, `opening` included; empty if the model has no calls. With `triggers`, of what
        begins with one of these.
        """

    @property
    def parser(self) -> str: ...
    @property
    def preserved(self) -> list[str]:
        """Control tokens that are part of a call."""

    @property
    def triggers(self) -> list[str]:
        """Words that begin a call in an answer that may have one; empty where there are none, or patterns."""

    @property
    def stops(self) -> list[str]: ...
    @property
    def thinking_start(self) -> str: ...
    @property
    def thinking_ends(self) -> list[str]: ...
    def parse(self, answer: str, partial: bool) -> str:
        """{"content", "reasoning_content", "tool_calls": [{"id", "name", "arguments"}]}; what is certain of
        an answer that is `partial`.
        """

class ChatTemplate:
    """A Jinja template; any number of threads may use it."""

    def __init__(self, source: str, bos: str, eos: str) -> None: ...
    def apply(
        self,
        messages: str,
        tools: str,
        tool_choice: str,
        parallel: bool,
        thinking: bool,
        variables: dict[str, str],
        continues: bool,
    ) -> ChatPrompt:
        """
        Args:
            variables: of the template, each value as JSON.
            continues: the last message is the answer's beginning.
        """
