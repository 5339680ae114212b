"""Errors that a caller may want to tell from a plain ValueError."""

from __future__ import annotations


class UnsupportedModelError(ValueError):
    """The model, or the way its context is set up, cannot have the cache that was asked for."""


class InvalidModelFileError(ValueError):
    """The file is not a GGUF model that can be loaded: not GGUF, truncated, or damaged."""


class ModelReadError(OSError):
    """The model's file cannot be read any more: cut short, written to, or a failing disk."""


class ContextLengthError(ValueError):
    """A prompt is empty, or longer than the context.

    Attributes:
        n_tokens, most: the prompt's tokens, and how many the context takes; 0 where they were not counted.
    """

    def __init__(self, message: str, n_tokens: int = 0, most: int = 0) -> None:
        super().__init__(message)
        self.n_tokens, self.most = n_tokens, most


class DeadEndError(ValueError):
    """No token can continue the answer under its constraint, or finding one exceeds the limits."""


class ContextBusyError(RuntimeError):
    """Another thread, another answer or an engine is using the context; nothing was done."""


class MissingRowsError(RuntimeError):
    """Rows that the next token reads are not in the cache any more, so nothing was evaluated."""


class StoppedError(RuntimeError):
    """The evaluation was stopped by `Llama.interrupt`."""


class EngineError(RuntimeError):
    """Evaluation failed; the answer is lost, the engine goes on."""


class NotFiniteError(EngineError):
    """The model computed values that are no numbers: NaN, or infinite. Nothing can be chosen from them, and
    no row that was computed from them is kept.

    Args:
        where: which values.
    """

    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where} are not numbers (NaN or infinite), so this ends here and no row that was computed "
            f"from them is kept. Either the model's file is damaged: get it again; or its numbers overflow "
            f"with this input: use the model in another type (BF16 in place of F16), or change the input"
        )


def not_finite_at(pos: int) -> NotFiniteError:
    """Return the error for a sequence whose token at position `pos` gave the first of such values."""
    return NotFiniteError(f"the model's values from token {pos} of this sequence on")


class QueueFullError(RuntimeError):
    """The queue is full: as many requests wait as may."""


class RowsGoneError(RuntimeError):
    """The rows that vectors build on are not in the context any more: all of them are needed again."""


CLOSED = (
    "this Llama is closed: its model and its KV cache are gone. Keep the Llama itself (llm = Llama(...)), "
    "and open, for as long as llm.kv is used"
)


class ClosedError(RuntimeError):
    """The `Llama` is closed, or the engine is shutting down or has stopped."""


class ModelChangedError(ClosedError):
    """The model's file was changed in place; the engine has stopped."""
