"""Methods by which the engine reports its work; the server's `metrics` makes Prometheus metrics of them."""

from __future__ import annotations

from mixedkv.engine.schedule.progress import Progress


class Observer:
    """Receives events on the engine's thread. A subclass overrides the methods it needs."""

    def started(self, job: Progress) -> None:
        """Note that a job has a sequence."""

    def prompt_done(self, job: Progress) -> None:
        """Note that the prompt is evaluated; `n_cached` and `cached_tier` are final."""

    def token(self, job: Progress, now: float) -> None:
        """Note that a token was chosen. `t_last` is still the time of the token before it, None for the
        first.
        """

    def finished(self, job: Progress, reason: str) -> None: ...

    def cancelled(self, job: Progress) -> None: ...

    def failed(self, job: Progress) -> None: ...

    def step(self, n_streams: int, n_prompt: int, seconds: float) -> None: ...

    def speculated(self, n_drafted: int, n_accepted: int) -> None:
        """Count the tokens of a job that were drafted in a step, and those that were accepted."""

    def evicted(self) -> None: ...

    def paused(self) -> None:
        """Note that an answer was paused in favour of another tenant's."""

    def preempted(self) -> None: ...

    def restored(self, job: Progress) -> None:
        """Note that the rows fetched for a job are in the context."""

    def restore_failed(self, reason: str) -> None: ...

    def stored(self, n_tokens: int) -> None: ...

    def checked(self, kld: float, is_off: bool) -> None:
        """Note that an answer with reused chunks was also evaluated exactly: its divergence in nats, and
        whether the reuse of chunks is now off. Not called on the engine's thread.
        """

    def store_failed(self, reason: str) -> None: ...

    def rechecked(self, problem: str) -> None:
        """Count tokens of stored rows that were evaluated again, and what is wrong with the rows, "" if
        nothing is.
        """

    # --- embeddings: the first two on the event loop ---

    def embedding_requests(self, n: int) -> None:
        """Change the number of running and waiting requests for vectors."""

    def embedded(self, outcome: str, seconds: float) -> None:
        """Note how a request for vectors ended: "stop", "abort" or "error"."""

    def embedded_piece(self, n_tokens: int, ends: bool) -> None:
        """Count evaluated tokens; `ends` says that their input is complete and has its vector."""

    def embedding_slice(self, seconds: float) -> None:
        """Note how long running answers waited for a slice, in seconds."""
