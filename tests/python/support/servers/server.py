"""A real `mixedkv serve` process for tests, and jobs for an engine without HTTP."""

from __future__ import annotations

import http.client
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.engine.engine import Engine
from mixedkv.engine.jobs.job import Done, Failed, Job
from mixedkv.engine.sample.sampling import Sampling
from mixedkv.engine.schedule.request import Request
from support.cache.hidden import hidden
from support.patience import PATIENCE, wait_for
from support.servers.prefork import Forked

MODEL = model_path().stem
_SETTING = re.compile("MIXEDKV_(?!ISA$)")  # variables a server reads its options from


class Server:
    """One process. `log` is what it wrote to stderr so far."""

    def __init__(
        self, *options: str, environ: dict[str, str] | None = None, program: Sequence[str] = ()
    ) -> None:
        options = ("--port", "0", "--threads", "1", *options)
        env = {name: value for name, value in os.environ.items() if not _SETTING.match(name)}
        self.process: Forked | subprocess.Popen[str]
        if environ or program:  # which may be read as modules are imported
            command = [sys.executable, *(program or ("-m", "mixedkv", "serve")), *options]
            self.process = subprocess.Popen(
                command, stderr=subprocess.PIPE, text=True, env={**env, **(environ or {})}
            )
        else:
            self.process = Forked(["serve", *options], env)
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port = 0
        self.scheme, self.tls = "http", None  # an ssl.SSLContext that knows the certificate

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line)

    @property
    def log(self) -> str:
        return "".join(self._lines)

    def wait_for_log(self, text: str, n: int = 1) -> None:
        """Wait until the log has a text so often: who gets an answer may be ahead of who reads the log."""
        wait_for(lambda: self.log.count(text) >= n)
        assert self.log.count(text) == n, self.log

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def wait_until_ready(self) -> Server:
        wait_for(lambda: self._is_ready() or self.process.poll() is not None)
        if self.process.poll() is not None:
            raise RuntimeError(f"the server did not start:\n{self.log}")
        return self

    def _is_ready(self) -> bool:
        if found := re.search(r' on (https?)://[^"\s]*:(\d+)(?:$|"})', self.log, re.M):
            self.scheme, self.port = found[1], int(found[2])
        return bool(self.port) and self.status("GET", "/ready") == 200

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def request(
        self, method: str, path: str, body: Any = None, key: str = "", raw: bytes | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, parsed body and headers."""
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE, context=self.tls) as response:
                return response.status, _parse(response.read()), dict(response.headers)
        except urllib.error.HTTPError as error:
            return error.code, _parse(error.read()), dict(error.headers)

    def status(self, method: str, path: str, body: Any = None, **options: Any) -> int:
        """Return 0 where the connection ends without an answer."""
        try:
            return self.request(method, path, body, **options)[0]
        except (OSError, http.client.HTTPException):
            return 0

    def post(self, path: str, body: Any, **options: Any) -> Any:
        status, answer, _ = self.request("POST", path, body, **options)
        assert status < 300, (status, answer)
        return answer

    def events(self, path: str, body: Any) -> list[Any]:
        """Return the data of a stream's events, but for the last one, [DONE]."""
        lines = self.post(path, {**body, "stream": True}).splitlines()
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]

    @property
    def resident_mib(self) -> float:
        """Memory of the server and its processes."""
        return self.own_resident_mib + sum(map(resident_mib, children(self.process.pid)))

    @property
    def own_resident_mib(self) -> float:
        """Memory of the server without its processes, which end by themselves when they have become large."""
        return resident_mib(self.process.pid)

    def stats(self, key: str = "") -> Any:
        return self.request("GET", "/v1/stats", key=key)[1]

    def metrics(self, key: str = "") -> str:
        """Prometheus' text of a moment after this call: who asks soon again gets the text of before."""
        began, text = time.time(), ""

        def is_new() -> bool:
            nonlocal text
            status, text, _ = self.request("GET", "/metrics", key=key)
            assert status == 200, text
            made = re.search(r"^mixedkv_lora_requests_info{.*} (.*)$", text, re.M)
            return made is not None and float(made[1]) >= began

        wait_for(is_new)
        return text

    def wait_until_idle(self, key: str = "") -> Any:
        """Stats once nothing runs or waits any more."""
        now: Any = {}

        def is_idle() -> bool:
            now.update(self.stats(key))
            busy = now["requests"]["running"] + now["requests"]["waiting"]
            return not busy and not (now["store"] or {}).get("waiting_to_be_stored")

        wait_for(is_idle)
        return now


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode("utf-8", "replace")


def resident_mib(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except FileNotFoundError:  # it has just ended
        return 0.0


@contextmanager
def running(*options: str, environ: dict[str, str] | None = None) -> Iterator[Server]:
    """A server that takes requests; stopped at the end."""
    server = Server(*options, environ=environ)
    try:
        yield server.wait_until_ready()
    finally:
        if server.process.poll() is None:
            server.stop(signal.SIGKILL)


def children(pid: int) -> list[int]:
    """Processes that a process has started, on any of its threads."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has just ended
            found += map(int, task.read_text().split())
    return found


def key_file(folder: Path, *lines: str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_text("".join(line + "\n" for line in lines))
    path.chmod(mode)
    return path


class Direct:
    """An engine on the bundled model without HTTP."""

    def __init__(
        self, *, kv: str = "mixed", n_ctx: int = 2048, parallel: int = 4, idle: int = 4, **options: Any
    ):
        with hidden(hot_budget="all"):  # each sequence has its window
            self.llm = Llama(
                model_path(),
                kv=kv,
                n_ctx=n_ctx,
                n_seq_max=parallel + idle,
                kv_unified=True,
                n_threads=1,
                n_threads_batch=1,
                n_batch=256,
                verbose=False,
            )
        self.engine = Engine(self.llm, parallel=parallel, **options)

    def __enter__(self) -> Direct:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self.llm.close()

    def tokens(self, text: str) -> list[int]:
        return self.llm.tokenize(text.encode(), add_bos=False, special=True)

    def job(
        self, prompt: str | Sequence[int], max_tokens: int = 32, **options: Any
    ) -> tuple[Job, queue.Queue[Any]]:
        """A job that is not submitted yet, greedy unless told otherwise, and its events."""
        if max_tokens:
            options.setdefault("sampling", Sampling(temperature=0))
        events: queue.Queue[Any] = queue.Queue()
        tokens = self.tokens(prompt) if isinstance(prompt, str) else prompt
        (job,) = self.engine.prepare([Request(prompt=tokens, max_tokens=max_tokens, **options)])
        job.deliver = events.put
        return job, events

    def start(
        self, prompt: str | Sequence[int], max_tokens: int = 32, **options: Any
    ) -> tuple[Job, queue.Queue[Any]]:
        job, events = self.job(prompt, max_tokens, **options)
        self.engine.submit_jobs([job])
        return job, events

    def answer(self, prompt: str | Sequence[int], max_tokens: int = 32, **options: Any) -> tuple[Job, Done]:
        job, events = self.start(prompt, max_tokens, **options)
        return job, end_of(events)

    def call(self, function: Callable[[], Any]) -> Any:
        return self.engine.call(function).result(PATIENCE)


def end_of(events: queue.Queue[Any]) -> Done:
    """Wait for the end of a job; raises what it failed with."""
    while True:
        event = events.get(timeout=PATIENCE)
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Done):
            return event
