"""The client of a split server: tokens become vectors here, and hidden states become tokens."""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np

from mixedkv.backoff import Backoff
from mixedkv.engine.chat.tokenizer import Prompt
from mixedkv.engine.sample.sampling import Sampling
from mixedkv.errors import ClosedError, ContextLengthError
from mixedkv.hosts import is_local
from mixedkv.native.detokenizer import TextStream
from mixedkv.prompts.prompt_lookup import PromptLookup
from mixedkv.tokens import common_prefix
from mixedkv_split import split_pb2 as pb
from mixedkv_split import wire
from mixedkv_split.head import Floats, Head
from mixedkv_split.parts import VERSION
from mixedkv_split.session_key import session_name, wrap

log = logging.getLogger("mixedkv.split")

_OPTIONS = [
    ("grpc.max_receive_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
]
# a server that cannot be reached now, has no room, or has given up a stream that was silent for long
_AGAIN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)
_REMEDIES = {
    grpc.StatusCode.UNAVAILABLE: "start `mixedkv split serve` there, or check address, TLS and certificates",
    grpc.StatusCode.DEADLINE_EXCEEDED: "it took too long: try again, or raise its --step-timeout",
    grpc.StatusCode.UNAUTHENTICATED: "give the key of a tenant of that server",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "it has no room now: try again later",
}
_CHUNK = 256  # tokens of a prompt in one message: the server evaluates one while the next is on its way
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 2.0  # seconds between attempts to reach a server
_DESCRIBE_SECONDS, _FORGET_SECONDS = 20.0, 5.0
_MOST_RESENDS = 8  # in a row, without a token in between


class SplitServerError(grpc.RpcError, ConnectionError):  # type: ignore[misc]
    """A split server refuses, cannot be reached, or has gone. The message has its address and the remedy."""

    def __init__(self, address: str, code: grpc.StatusCode, details: str) -> None:
        self._code = code
        remedy = f": {_REMEDIES[code]}" if code in _REMEDIES else ""
        super().__init__(f"the split server at {address}: {code.name}: {details}{remedy}")

    def code(self) -> grpc.StatusCode:
        """Return gRPC's status."""
        return self._code


def _from(address: str, error: grpc.RpcError) -> SplitServerError:
    if isinstance(error, SplitServerError):
        return error
    return SplitServerError(address, error.code(), error.details())


class SplitClient:
    """A connection to a split server, for the head of its model. Any thread may use it.

    Args:
        head: stays open when the client is closed.
        address: host:port.
        precision: of the vectors on the wire: "f16", or "f32" at twice the bytes.
        key: bearer key.
        credentials: of a TLS connection, see `tls`; None for one without, with a key to this machine only.
        patience: seconds for which a server that cannot be reached is tried again.
        keepalive: seconds after which a silent network is asked for a sign of life; after as many more it is
            given up.

    Raises:
        ValueError: the server has another model or version, or an argument is wrong.
        SplitServerError: the server cannot be reached, or refuses.
    """

    def __init__(
        self,
        head: Head,
        address: str,
        *,
        precision: str = "f16",
        key: str = "",
        credentials: grpc.ChannelCredentials | None = None,
        patience: float = 60.0,
        keepalive: float = 20.0,
    ) -> None:
        if precision not in wire.PRECISIONS:
            raise ValueError(f"precision={precision!r}: use {' or '.join(wire.PRECISIONS)}")
        self.head, self.precision = head, wire.PRECISIONS[precision]
        self.address = address
        self.patience = patience
        milliseconds = int(keepalive * 1000)
        options = [*_OPTIONS, *((f"grpc.keepalive_{name}_ms", milliseconds) for name in ("time", "timeout"))]
        if credentials is None:
            if key and not is_local(address.rpartition(":")[0].strip("[]")):
                raise ValueError("key: give credentials as well, or everybody on the way can read it")
            self._channel = grpc.insecure_channel(address, options)
        else:
            self._channel = grpc.secure_channel(address, credentials, options)
        self.metadata = (("authorization", f"Bearer {key}"),) if key else ()
        self.stub: Any = wire.Stub(self._channel)
        try:
            found = self.describe()
            self.n_ctx = int(found.n_ctx)
            self.max_rollback = min(int(found.max_rollback), int(found.max_hidden) - 1)
            self.can_drop, self.sinks = bool(found.can_drop), int(found.sinks)
        except BaseException:
            self.close()
            raise

    def describe(self) -> pb.Description:
        """Ask the server whether it has the body of this head, and for its numbers.

        Raises:
            ValueError, SplitServerError: as for making the client.
        """
        request = pb.DescribeRequest(version=VERSION, pair=self.head.pair)
        try:
            found: pb.Description = self.stub.Describe(
                request, metadata=self.metadata, timeout=_DESCRIBE_SECONDS
            )
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED):
                raise ValueError(f"the server cannot serve this head: {error.details()}") from error
            raise _from(self.address, error) from error
        if (found.version, found.pair, found.width) != (VERSION, self.head.pair, self.head.width):
            raise ValueError("the server has another model or version than this head")
        return found

    def session(self, key: bytes | None = None, tokens: Sequence[int] = ()) -> SplitSession:
        """Open a session, a sequence of tokens that grows; close it to have the server forget it.

        Args:
            key: from `session_key.new_key`, for one that the server can keep.
            tokens: that it had when it was kept with this key.

        Raises:
            ValueError: the key has another length, or there are tokens without one.
            IndexError: a token is not of this model.
        """
        return SplitSession(self, key, tokens)

    def generate(self, prompt: Prompt, *, max_tokens: int = 256, **options: Any) -> Iterator[str]:
        """Generate as `SplitSession.generate` does, in a session of its own."""
        with self.session() as session:
            yield from session.generate(prompt, max_tokens=max_tokens, **options)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> SplitClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tls(ca: str = "", certificate: str = "", key: str = "") -> grpc.ChannelCredentials:
    """Return the credentials of a TLS connection, from PEM files.

    Args:
        ca: who signs the server's certificate; "" for the system's list.
        certificate, key: the client's own, for a server that asks.

    Raises:
        ValueError: a certificate without its key, or the other way round.
        OSError: a file cannot be read.
    """
    if bool(certificate) != bool(key):
        raise ValueError("certificate and key go together: give both, or none")
    data = [Path(path).read_bytes() if path else None for path in (ca, key, certificate)]
    return grpc.ssl_channel_credentials(*data)


class SplitSession:
    """Tokens that the server has rows of. For one thread.

    Attributes:
        tokens: those evaluated.
        text_tokens: of the latest prompt and its answer, which may end in a token that was not evaluated.
        n_sent_bytes, n_received_bytes: of vectors, resent ones included.
        n_kept: the first of them, which the server has on its disk; they are found there with the key only.
        n_resends: how often all that were not kept had to be sent again.
    """

    def __init__(self, client: SplitClient, key: bytes | None = None, tokens: Sequence[int] = ()) -> None:
        if tokens and key is None:
            raise ValueError("tokens: give the key that they were kept with")
        self._client, self._head, self._key = client, client.head, key
        self._name = secrets.token_bytes(wire.SESSION_BYTES) if key is None else session_name(key)
        self._stream: _Stream | None = None
        self.tokens = list(tokens)
        self.text_tokens = list(tokens)
        self.n_kept = len(tokens)
        self.n_sent_bytes = self.n_received_bytes = self.n_resends = 0
        self._first = 0  # tokens right after the last drop: those before cannot be gone back to
        self._hashes = [
            wire.first_hash(self._head.pair, client.precision)
        ]  # of `_first` tokens, one more, ...
        self._drop: _Drop | None = None  # that the server has not confirmed
        self._dropped: list[int] = []  # of the text behind its sinks, so far
        for begin in range(0, len(tokens), _CHUNK):
            part = tokens[begin : begin + _CHUNK]
            data = wire.pack(self._head.embed(part), client.precision)
            self._hashes += wire.next_hashes(self._hashes[-1], data, len(part))

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 256,
        stop: str | Sequence[str] = (),
        sinks: int = 4,
        window: int = 0,
        draft: int = 0,
        **sampling: Any,
    ) -> Iterator[str]:
        """Answer a prompt, in chunks of text. What the prompt has in common with the session's tokens is not
        sent again.

        Args:
            prompt: a text, token ids, or the messages of a chat.
            window: where prompt and answer reach the server's context, go on with their first `sinks` and
                last `window` tokens; 0 ends the answer there, and refuses a longer prompt. The server drops
                the others and keeps the rows of these. One that cannot gets them sent anew.
            draft: where the last three tokens stood before, what followed them is sent along, up to so many
                tokens: those that are right come without a round trip of their own. The server has a limit.
            **sampling: fields of `Sampling`.

        Raises:
            ContextLengthError: the prompt is empty, or too long for the server and there is no window.
            ValueError: an argument is wrong.
            SplitServerError: the server refuses, or could not be reached for `patience` seconds.
        """
        head = self._head
        tokens, chat = head.tokenizer.encode(prompt)
        text = TextStream([*([stop] if isinstance(stop, str) else stop), *chat.stops])
        answer = self.generate_tokens(
            tokens, max_tokens=max_tokens, sinks=sinks, window=window, draft=draft, **sampling
        )
        for token in answer:
            if chunk := text.feed(head.detokenizer[token]):
                yield chunk
            if text.stopped:
                return
        if rest := text.finish():
            yield rest

    def generate_tokens(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        sinks: int = 4,
        window: int = 0,
        draft: int = 0,
        **sampling: Any,
    ) -> Iterator[int]:
        """Generate as `generate` does, and yield the answer's tokens, without the one that ends it."""
        n_ctx = self._client.n_ctx
        if sinks < 0 or window < 0 or (window and sinks + window >= n_ctx):
            raise ValueError(f"sinks={sinks}, window={window}: the server has room for {n_ctx - 1} tokens")
        if not prompt or (len(prompt) >= n_ctx and not window):
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens, the server takes 1 to {n_ctx - 1}: shorten it, or "
                f"give a window"
            )
        sampler = self._head.tokenizer.sampler(Sampling(**sampling))
        sampler.accept_prompt(prompt)
        tokens, lookup, n_left = self._without_dropped(prompt, sinks), PromptLookup(prompt), max_tokens
        if len(tokens) >= n_ctx:
            log.warning(
                "the prompt has %d tokens, and the server room for %d: its first %d and its last %d are used",
                *(len(prompt), n_ctx - 1, sinks, window),
            )
        self.text_tokens = tokens
        try:
            while n_left > 0:
                if len(tokens) >= n_ctx:
                    if not window:
                        return
                    tokens = self.text_tokens = self._slide(tokens, sinks, window)
                most = min(draft, self._client.max_rollback, n_left - 1, n_ctx - 1 - len(tokens))
                drafts = lookup.draft(most)
                logits = self._head.logits(self._evaluate([*tokens, *drafts], 1 + len(drafts)))
                for row, drafted in zip(logits, [*drafts, None], strict=True):
                    token = sampler.choose(row)
                    if self._head.detokenizer.is_end(token):
                        return
                    tokens.append(token)
                    yield token
                    lookup.add(token)
                    n_left -= 1
                    if token != drafted:
                        break
        finally:
            sampler.close()

    @property
    def n_dropped(self) -> int:
        """Number of tokens that the latest prompt and its answer had, and that went to fit the context."""
        return len(self._dropped)

    def _without_dropped(self, prompt: Sequence[int], sinks: int) -> list[int]:
        """Return the prompt without what the session has dropped of it, if it is too long and the session
        goes on with it.
        """
        tokens, n = list(prompt), len(self._dropped)
        if n and len(tokens) >= self._client.n_ctx and tokens[sinks : sinks + n] == self._dropped:
            rest = tokens[:sinks] + tokens[sinks + n :]
            least = max(self._first, len(self.tokens) - self._client.max_rollback, sinks + 1)
            if least <= len(rest) and self.tokens[:least] == rest[:least]:
                return rest
        self._dropped = []
        return tokens

    def _slide(self, tokens: list[int], sinks: int, window: int) -> list[int]:
        """Return the first `sinks` and the last `window` tokens. If the server can drop those between them
        and move its rows of those behind, the next message tells it to.
        """
        end = len(tokens) - window
        self._dropped += tokens[sinks:end]
        if self._client.can_drop and self._client.sinks <= sinks:
            self._go_back(tokens, 1)
            if self._drop is not None:  # the last answer ended before the server had confirmed it
                self._forget()
            if sinks < end < len(self.tokens):
                self._drop_tokens(sinks, end)
        return [*tokens[:sinks], *tokens[end:]]

    def _drop_tokens(self, begin: int, end: int) -> None:
        """Drop tokens [begin, end) here; the next message says so to the server, until it has answered."""
        n, before = len(self.tokens), self._hashes[-1]
        self._drop = _Drop(n, before, begin, end)
        self._hashes = [wire.hash_after_drop(before, begin, end)]
        del self.tokens[begin:end]
        self._first, self.n_kept = len(self.tokens), 0

    def _evaluate(self, tokens: list[int], n_hidden: int) -> Floats:
        """Return the hidden states of the last tokens, [n_hidden, width]."""
        self._go_back(tokens, n_hidden)
        backoff, end, resends = (
            Backoff(_FIRST_WAIT, _LONGEST_WAIT),
            time.monotonic() + self._client.patience,
            0,
        )
        while True:
            try:
                return self._send(tokens, n_hidden)
            except grpc.RpcError as error:
                code = error.code()
                self._stream = None
                if code == grpc.StatusCode.FAILED_PRECONDITION and resends < _MOST_RESENDS:
                    resends += 1
                    self.n_resends += 1
                    self._forget(keep=resends == 1)
                elif code in _AGAIN and time.monotonic() + backoff.failed() < end:
                    time.sleep(backoff.seconds)
                else:
                    raise _from(self._client.address, error) from error

    def _go_back(self, tokens: list[int], n_new: int) -> None:
        """Cut the session to what it has in common with these tokens, without the last `n_new`."""
        n = len(self.tokens)
        if n <= len(tokens) - n_new and self.tokens == tokens[:n]:
            return
        common = common_prefix(np.array(self.tokens, np.int32), np.array(tokens, np.int32))
        n_kept = min(common, len(tokens) - n_new)
        if n_kept == 0 or n - n_kept > self._client.max_rollback or n_kept < self._first:
            self._forget()
        del self.tokens[n_kept:], self._hashes[n_kept + 1 - self._first :]
        if n_kept < self.n_kept:
            self.n_kept = 0

    def _send(self, tokens: list[int], n_hidden: int) -> Floats:
        """Send what the server has not, in messages that go out before the first is answered."""
        client = self._client
        wrapped_key = self._wrapped_key() if self._stream is None and self.tokens else b""
        stream = self._open()
        chunk = max(1, min(_CHUNK, wire.MAX_MESSAGE_BYTES // (8 * self._head.width)))
        begin, sent = len(self.tokens), []
        last_hash, drop = self._hashes[-1], self._drop
        for end in [*range(begin + chunk, len(tokens) - n_hidden + 1, chunk), len(tokens)]:
            part = tokens[begin:end]
            data = wire.pack(self._head.embed(part), client.precision)
            stream.send(
                pb.Vectors(
                    session=self._name,
                    position=begin if drop is None else drop.position,
                    running_hash=last_hash if drop is None else drop.running_hash,
                    precision=client.precision,
                    n=len(part),
                    data=data,
                    n_hidden=n_hidden if end == len(tokens) else 0,
                    wrapped_key=wrapped_key,
                    drop_begin=0 if drop is None else drop.begin,
                    drop_end=0 if drop is None else drop.end,
                )
            )
            wrapped_key, drop = b"", None
            hashes = wire.next_hashes(last_hash, data, len(part))
            sent.append((part, hashes))
            begin, last_hash = end, hashes[-1]
            self.n_sent_bytes += len(data)
        for part, hashes in sent:
            reply = stream.receive()
            self.tokens += part
            self._hashes += hashes
            if reply.position != len(self.tokens) or reply.running_hash != hashes[-1]:
                raise ValueError("the server is out of step: this is a bug, please report it")
            self._drop = None
        self.n_received_bytes += len(reply.data)
        return wire.unpack(reply.data, n_hidden, self._head.width, client.precision)

    def _open(self) -> _Stream:
        if self._stream is None:
            self._stream = _Stream(self._client)
        return self._stream

    def _forget(self, keep: bool = False) -> None:
        """Begin anew, or with `keep` from what was kept."""
        n = min(self.n_kept, len(self.tokens)) if keep else 0
        if self._first:  # nothing is kept of rows that were moved
            self._first, self._drop = 0, None
            self._hashes = [wire.first_hash(self._head.pair, self._client.precision)]
        del self.tokens[n:], self._hashes[n + 1 :]
        self.n_kept = n

    def keep(self) -> int:
        """Have the server write the rows of `tokens` to its disk, encrypted with this session's key, which it
        then forgets. With key and tokens `SplitClient.session` goes on from there, also after a restart.

        Returns:
            How many tokens were not kept before.

        Raises:
            ValueError: the session has no key, or the server keeps none.
            SplitServerError: the server refuses, or cannot be reached.
        """
        if self._key is None:
            raise ValueError(
                "the session has no key and cannot be kept: open it with key=session_key.new_key()"
            )
        if not self.tokens:
            return 0
        for last in (False, True):
            wrapped_key = self._wrapped_key()
            if not wrapped_key:
                raise ValueError("the server keeps no sessions: it was started without --store")
            request = pb.KeepRequest(
                session=self._name,
                position=len(self.tokens),
                running_hash=self._hashes[-1],
                wrapped_key=wrapped_key,
            )
            try:
                reply: pb.KeepReply = self._client.stub.Keep(request, metadata=self._client.metadata)
                break
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.FAILED_PRECONDITION or last:
                    raise _from(self._client.address, error) from error
                tokens = self.tokens.copy()  # its rows have gone
                self._forget()
                self._evaluate(tokens, 1)
        self.n_kept = len(self.tokens)
        return int(reply.n_stored)

    def _wrapped_key(self) -> bytes:
        """Return the key wrapped for the server that answers now: another process has another key. Empty
        without one, or for a server that keeps nothing.
        """
        if self._key is None:
            return b""
        public_key = self._client.describe().public_key
        return wrap(self._key, public_key, self._name) if public_key else b""

    def close(self, forget: bool | None = None) -> None:
        """Have the server forget the session, if it can be reached.

        Args:
            forget: what it has kept, too; None is for sessions without a key.
        """
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if self.tokens and (forget or self._key is None):
            with contextlib.suppress(grpc.RpcError):
                request = pb.ForgetRequest(session=self._name, wrapped_key=self._wrapped_key())
                self._client.stub.Forget(request, metadata=self._client.metadata, timeout=_FORGET_SECONDS)
            self._forget()

    def __enter__(self) -> SplitSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Drop(NamedTuple):
    """Tokens at positions [begin, end) that are to go from a session of `position` tokens."""

    position: int
    running_hash: bytes
    begin: int
    end: int


class _Stream:
    """One call of Evaluate."""

    def __init__(self, client: SplitClient) -> None:
        self._outgoing: queue.SimpleQueue[pb.Vectors | None] = queue.SimpleQueue()
        self._call = client.stub.Evaluate(iter(self._outgoing.get, None), metadata=client.metadata)

    def send(self, message: pb.Vectors) -> None:
        self._outgoing.put(message)

    def receive(self) -> pb.Hidden:
        """Wait for the next answer of the server.

        Raises:
            grpc.RpcError: the server ended the stream, or cannot be reached any more.
        """
        reply: pb.Hidden | None = next(self._call, None)
        if reply is not None:
            return reply
        raise ClosedError("the server ended the stream")

    def close(self) -> None:
        self._outgoing.put(None)
        self._call.cancel()
