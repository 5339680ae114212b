"""The gRPC service: messages become jobs of the engine, hidden states go back."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
import numpy as np

from mixedkv.engine.batch.vector_job import VectorJob
from mixedkv.engine.engine import Engine
from mixedkv.engine.jobs.job import Event, Failed
from mixedkv.errors import ClosedError, ContextLengthError, QueueFullError, RowsGoneError
from mixedkv.kv.fetched import Fetched
from mixedkv.store.entries import TooLargeError
from mixedkv_service.keys import Keys
from mixedkv_split import split_pb2 as pb
from mixedkv_split import wire
from mixedkv_split.parts import VERSION, ModelPart
from mixedkv_split.sessions import Kept, KeptSessions, Place, Session, Sessions

log = logging.getLogger("mixedkv.split")

_Context = Any  # grpc.aio.ServicerContext
_GONE = "send all vectors again from position 0"
_STATUS = {
    QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ClosedError: grpc.StatusCode.UNAVAILABLE,
    ContextLengthError: grpc.StatusCode.OUT_OF_RANGE,
    TooLargeError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ValueError: grpc.StatusCode.INVALID_ARGUMENT,
}


class SplitService:
    """Implements the gRPC service of split.proto, for `wire.add_service`.

    Args:
        engine: on the body of a split model.
        part: what its header says.
        keys: of the tenants.
        kept: sessions on disk; None keeps none.
        max_streams: of a tenant at a time.
        step_seconds: that one message may take.
        idle_seconds: that a stream may wait for the client's next message.
    """

    def __init__(
        self,
        engine: Engine,
        part: ModelPart,
        keys: Keys,
        sessions: Sessions,
        kept: KeptSessions | None = None,
        *,
        max_streams: int,
        step_seconds: float,
        idle_seconds: float,
    ) -> None:
        self._engine, self._part, self._keys, self._sessions = engine, part, keys, sessions
        self._kept = kept
        self._max_streams, self._step_seconds, self._idle_seconds = max_streams, step_seconds, idle_seconds
        # of a mixed cache the F16 window must be what it was before
        self._max_rollback = min(wire.MAX_HIDDEN, engine.llm.kv.config.window.n_draft or wire.MAX_HIDDEN)
        # where layers slide, rows that come near by a drop may have gone
        self._can_drop = engine.pool.can_move and engine.pool.rule.sliding == 0
        self._sinks = engine.pool.rule.window.sink_tokens
        self._streams: Counter[str] = Counter()

    # --- methods of the service ---

    async def Describe(self, request: pb.DescribeRequest, context: _Context) -> pb.Description:  # noqa: N802
        async with _refusing(context):
            self._tenant(context)
            if request.version != VERSION:
                what = f"version={request.version}: this server speaks {VERSION}"
                raise _RefusedError(grpc.StatusCode.UNIMPLEMENTED, what)
            if request.pair and request.pair != self._part.pair:
                raise ValueError(
                    "pair: this server has the body of another model: use the head that was exported with it"
                )
            return pb.Description(
                version=VERSION,
                pair=self._part.pair,
                width=self._part.width,
                n_ctx=self._engine.n_ctx,
                max_message_bytes=wire.MAX_MESSAGE_BYTES,
                max_hidden=wire.MAX_HIDDEN,
                max_rollback=self._max_rollback,
                public_key=self._kept.public_key if self._kept is not None else b"",
                can_drop=self._can_drop,
                sinks=self._sinks,
            )

    async def Evaluate(  # noqa: N802
        self, requests: AsyncIterator[pb.Vectors], context: _Context
    ) -> AsyncIterator[pb.Hidden]:
        async with _refusing(context):
            tenant = self._tenant(context)
            with self._stream(tenant):
                while (message := await self._next(context)) is not None:
                    if self._tenant(context) != tenant:  # it raises if the key was removed meanwhile
                        raise _RefusedError(
                            grpc.StatusCode.UNAUTHENTICATED, "the key is another tenant's now"
                        )
                    yield await self._step(tenant, message)

    async def Keep(self, request: pb.KeepRequest, context: _Context) -> pb.KeepReply:  # noqa: N802
        async with _refusing(context):
            tenant = self._tenant(context)
            if self._kept is None:
                what = "this server keeps no sessions: start it with --store"
                raise _RefusedError(grpc.StatusCode.UNIMPLEMENTED, what)
            session = self._sessions.get(tenant, request.session)
            if session is None or request.position != len(session) or not _stands(session, request):
                raise RowsGoneError(f"session, position={request.position}: it does not stand there")
            with _using(session):
                place = Place(request.position, request.running_hash, session.precision)
                n = await asyncio.to_thread(
                    self._kept.keep, tenant, request.session, place, session, request.wrapped_key
                )
            return pb.KeepReply(n_stored=n)

    async def Forget(self, request: pb.ForgetRequest, context: _Context) -> pb.ForgetReply:  # noqa: N802
        async with _refusing(context):
            tenant = self._tenant(context)
            session = self._sessions.get(tenant, request.session)
            if session is not None:
                with _using(session):
                    self._sessions.take(tenant, request.session)
                    self._let_go(tenant, session, forget=True)
            if request.wrapped_key and self._kept is not None:
                forget = self._kept.forget
                await asyncio.to_thread(forget, tenant, request.session, request.wrapped_key)
            return pb.ForgetReply()

    def _tenant(self, context: _Context) -> str:
        metadata = dict(context.invocation_metadata() or ())
        tenant = self._keys.tenant(str(metadata.get("authorization", "")))
        if tenant is None:
            what = "authorization: a valid bearer key is needed"
            raise _RefusedError(grpc.StatusCode.UNAUTHENTICATED, what)
        return tenant

    @contextmanager
    def _stream(self, tenant: str) -> Iterator[None]:
        """Count one more stream of a tenant.

        Raises:
            _RefusedError: it has as many as it may.
        """
        if self._streams[tenant] >= self._max_streams:
            what = f"there are {self._max_streams} streams already"
            raise _RefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, what)
        self._streams[tenant] += 1
        try:
            yield
        finally:
            self._streams[tenant] -= 1
            self._streams += Counter()  # those that are left

    # --- one message ---

    async def _next(self, context: _Context) -> pb.Vectors | None:
        """Return the next message, None where the client has sent its last one."""
        with _within(self._idle_seconds, "no message came for"):
            message = await context.read()
        return None if message is grpc.aio.EOF else message

    async def _step(self, tenant: str, message: pb.Vectors) -> pb.Hidden:
        """Evaluate the vectors of one message."""
        self._check(message)
        vectors = wire.unpack(message.data, message.n, self._part.width, message.precision)
        if message.drop_begin or message.drop_end:
            message = await self._drop(tenant, message)
        session, kept = await self._session(tenant, message)
        with _using(session):
            return await self._evaluate(tenant, message, vectors, session, kept)

    async def _drop(self, tenant: str, message: pb.Vectors) -> pb.Vectors:
        """Drop what a message asks for, unless the same message has come before; return the message that goes
        on from there.

        Raises:
            _RefusedError: a stream is using the session, or the step before took too long.
            RowsGoneError: the session is not known or stands elsewhere, or its rows have gone.
            ValueError: the precision is another one than the session's.
        """
        after = wire.without_drop(message)
        session = self._sessions.get(tenant, message.session)
        if session is not None and session.busy:
            raise _busy()
        if session is not None and after.running_hash == session.hash_at(after.position):
            return after
        session = _known(session, message)
        begin, end = message.drop_begin, message.drop_end
        with _using(session), _within(self._step_seconds, "a step took more than"):
            dropped = session.rows is not None and await asyncio.wrap_future(
                self._engine.drop_waiting(
                    session.rows,
                    tenant,
                    np.array(session.ids[: message.position], np.int32),
                    begin,
                    end,
                    self._max_rollback,
                )
            )
            if not dropped:
                self._sessions.take(tenant, message.session)
                raise RowsGoneError("the rows to move have gone")
            session.drop(message.position, begin, end, after.running_hash)
        return after

    async def _evaluate(
        self, tenant: str, message: pb.Vectors, vectors: wire.Vectors, session: Session, kept: Kept | None
    ) -> pb.Hidden:
        hashes = wire.next_hashes(message.running_hash, message.data, message.n)
        ids = session.ids[: message.position] + array("i", map(self._sessions.id_of, hashes))
        job = VectorJob(
            ids, vectors, message.n_hidden, tenant=tenant, resume=session.rows, most_cut=self._max_rollback
        )
        if kept is not None:
            job.prefix.fetched = Fetched(kept.blocks, kept.tier, exact=True)
        try:
            with _within(self._step_seconds, "a step took more than"):
                hidden = await self._run(job)
        except RowsGoneError:
            self._sessions.take(tenant, message.session)  # those that were kept may be there still
            raise
        finally:
            session.rows = job.rows
        session.go_on(message.position, ids, hashes)
        return pb.Hidden(
            position=len(session),
            running_hash=hashes[-1],
            n=message.n_hidden,
            data=wire.pack(hidden, message.precision),
        )

    def _check(self, message: pb.Vectors) -> None:
        """Refuse values that no message can have.

        Raises:
            ValueError: a field has a value that no message can have.
        """
        for name, value, size in (
            ("session", message.session, wire.SESSION_BYTES),
            ("running_hash", message.running_hash, wire.HASH_BYTES),
        ):
            if len(value) != size:
                raise ValueError(f"{name}: it has {size} bytes, not {len(value)}")
        if message.n < 1:
            raise ValueError("n: send one vector or more")
        if message.n_hidden > min(message.n, wire.MAX_HIDDEN):
            raise ValueError(
                f"n_hidden={message.n_hidden}: ask for {min(message.n, wire.MAX_HIDDEN)} at most"
            )
        if message.drop_begin or message.drop_end:
            self._check_drop(message)
        n_tokens = message.position - (message.drop_end - message.drop_begin) + message.n
        if n_tokens >= self._engine.n_ctx:
            raise _RefusedError(
                grpc.StatusCode.OUT_OF_RANGE,
                f"position={message.position}, n={message.n}: that is {n_tokens} tokens, and a session can "
                f"have {self._engine.n_ctx - 1}",
            )

    def _check_drop(self, message: pb.Vectors) -> None:
        """Refuse to drop what cannot be dropped.

        Raises:
            ValueError: the rows of this model cannot be moved, or the range is empty, begins within the
                sinks, or has the last token in it.
        """
        begin, end, position = message.drop_begin, message.drop_end, message.position
        what = f"drop_begin={begin}, drop_end={end}"
        if not self._can_drop:
            raise ValueError(
                f"{what}: this server cannot move rows (its Description has can_drop=false): send the tokens "
                f"that stay again, from position 0"
            )
        if not self._sinks <= begin < end < position:
            raise ValueError(
                f"{what}: use sinks={self._sinks} <= drop_begin < drop_end < position={position}"
            )

    async def _session(self, tenant: str, message: pb.Vectors) -> tuple[Session, Kept | None]:
        """Return the session that a message goes on with, and its rows if they are those that were kept.

        Raises:
            _RefusedError: a stream is using it.
            RowsGoneError: it is not there, or went on elsewhere.
            ValueError: the client's model or precision is another one, or its key was not wrapped for this.
        """
        session = self._sessions.get(tenant, message.session)
        if session is not None and session.busy:
            raise _busy()
        if message.position == 0:
            if message.running_hash != wire.first_hash(self._part.pair, message.precision):
                raise ValueError("running_hash: it is not that of an empty session of this model")
            return self._begin(tenant, message), None
        if message.wrapped_key and self._kept is not None and not _stands(session, message):
            return await self._resume(self._kept, tenant, message)
        return _known(session, message), None

    async def _resume(self, kept: KeptSessions, tenant: str, message: pb.Vectors) -> tuple[Session, Kept]:
        """Resume a session from what was kept of it."""
        found = await asyncio.to_thread(
            kept.find,
            tenant,
            message.session,
            Place(message.position, message.running_hash, message.precision),
            message.wrapped_key,
        )
        if found is None:
            raise RowsGoneError(f"session, position={message.position}: nothing is kept of it there")
        former = self._sessions.get(tenant, message.session)
        if former is not None and former.busy:
            raise _busy()
        session = self._begin(tenant, message)
        session.ids = found.ids
        return session, found

    def _begin(self, tenant: str, message: pb.Vectors) -> Session:
        if (former := self._sessions.take(tenant, message.session)) is not None:
            self._let_go(tenant, former)
        for owner, old in self._sessions.take_old(tenant):
            self._let_go(owner, old)
        recent = deque([message.running_hash], maxlen=self._max_rollback + 1)
        session = Session(message.precision, recent)
        self._sessions.add(tenant, message.session, session)
        return session

    async def _run(self, job: VectorJob) -> Any:
        loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def deliver(event: Event) -> None:  # on the engine's thread
            loop.call_soon_threadsafe(_settle, done, event)

        job.deliver = deliver
        self._engine.submit_jobs([job])
        try:
            await done
        finally:
            if not done.done() or done.cancelled():  # the client has gone, or it took too long
                self._engine.cancel(job)
        return job.hidden

    def _let_go(self, tenant: str, session: Session, forget: bool = False) -> None:
        """Let go of a session's rows; others that begin in the same way may start from them, unless they are
        to be forgotten.
        """
        rows, ids = session.rows, session.ids

        def let_go() -> None:
            if rows is not None and rows.paused and rows.tenant == tenant and rows.tokens == ids:
                rows.paused = False
                if forget or rows.assembled:  # nobody else can use rows that were moved
                    self._engine.pool.drop(rows)

        if rows is not None:
            self._engine.call(let_go)


class _RefusedError(Exception):
    def __init__(self, status: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.status = status


@asynccontextmanager
async def _refusing(context: _Context) -> AsyncIterator[None]:
    """End a call with the status of what is raised in it."""
    try:
        yield
    except Exception as error:
        refused = _refusal(error)
        await context.abort(refused.status, str(refused))


def _refusal(error: Exception) -> _RefusedError:
    if isinstance(error, _RefusedError):
        return error
    if isinstance(error, RowsGoneError):
        return _RefusedError(grpc.StatusCode.FAILED_PRECONDITION, f"{error}: {_GONE}")
    for kind, status in _STATUS.items():
        if isinstance(error, kind):
            return _RefusedError(status, str(error))
    log.warning("a step failed: %s", error)
    return _RefusedError(grpc.StatusCode.INTERNAL, f"the step failed: {error}")


def _stands(session: Session | None, message: pb.Vectors | pb.KeepRequest) -> bool:
    """Return whether a session has the tokens that a message goes on from."""
    return session is not None and message.running_hash == session.hash_at(message.position)


def _known(session: Session | None, message: pb.Vectors) -> Session:
    """Return the session if a message can go on with it.

    Raises:
        RowsGoneError: it is not there, or went on elsewhere.
        ValueError: the client's precision is another one.
    """
    if session is None or not _stands(session, message):
        reason = "it is not known" if session is None else "it does not stand there with these vectors"
        raise RowsGoneError(f"session, position={message.position}: {reason}")
    if message.precision != session.precision:
        raise ValueError("precision: a session has one from its start to its end")
    return session


def _busy() -> _RefusedError:
    return _RefusedError(grpc.StatusCode.ABORTED, "session: another stream is using it")


@contextmanager
def _within(seconds: float, reason: str) -> Iterator[None]:
    """Do what `asyncio.timeout` does, which Python has since 3.11. `asyncio.wait_for` makes a task each time.

    Raises:
        _RefusedError: what is awaited took longer.
    """
    task, over = asyncio.current_task(), False
    assert task is not None

    def end() -> None:
        nonlocal over
        over = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(seconds, end)
    try:
        yield
    except asyncio.CancelledError:
        if not over:
            raise
        text = f"{reason} {seconds:g} seconds"
        raise _RefusedError(grpc.StatusCode.DEADLINE_EXCEEDED, text) from None
    finally:
        timer.cancel()


@contextmanager
def _using(session: Session) -> Iterator[None]:
    """Mark the session as used by this stream.

    Raises:
        _RefusedError: another stream is.
    """
    if session.busy:
        raise _busy()
    session.busy = True
    try:
        yield
    finally:
        session.busy = False


def _settle(done: asyncio.Future[None], event: Event) -> None:
    if done.done():
        return
    if isinstance(event, Failed):
        done.set_exception(event.error)
    else:
        done.set_result(None)
