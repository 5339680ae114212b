"""What a newcomer does in the first hour, done step by step with SmolLM2, with the time that each step took.

PYTHONPATH=tests/python python docs/tools/first_hour.py WHEEL --pictures docs/plots > docs/first-hour.md

WHEEL is installed into an environment of its own, with an empty cache folder, and everything is done from
there. It needs the extra `test` where it runs, and chromium.
"""

from __future__ import annotations

import argparse
import html
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pyte
from playwright.sync_api import Page, sync_playwright

from support.clients.browser import PHONE, launch
from support.clients.terminal import Terminal
from support.patience import PATIENCE, wait_for

_HEAD = """# The first hour

What a newcomer does first, done by a program from an empty environment and an empty cache folder, on {cores}
cores of {cpu}. Times are of one run, from the key that is pressed to what is waited for. The model is
SmolLM2-135M-Instruct in Q4_1.
`PYTHONPATH=tests/python python docs/tools/first_hour.py WHEEL --pictures docs/plots > docs/first-hour.md`
makes this page, and fails where a step does not do what it says.

| step | seconds | what came |
|---|---|---|"""
_PICTURES = """
The terminal after the first question, and on another day:

![A question, its answer, and what the cache holds](plots/first-hour-chat.png)

![The last messages, and an answer whose KV came from disk](plots/first-hour-again.png)

The chat page, wide and on a phone:

![The chat page](plots/first-hour-page-wide.png)

![The chat page on a phone](plots/first-hour-page-phone.png)"""
_SIZE = (30, 96)  # of the terminal, in lines and columns
_PASTED = "".join(f"{i:3}  The lamp of mill {i} is kept behind door {i * 7 % 100}.\n" for i in range(200))
_CTRL_C, _CTRL_D = "\x03", "\x04"
_COLOURS = {"brown": "#b58900", "default": "#e6e6e6"}


class Record:
    """Rows of the page, printed as they are made."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def begin(self) -> None:
        self._began = time.monotonic()

    def row(self, step: str, came: str) -> None:
        seconds = time.monotonic() - self._began
        text = " ".join(came.split()).replace("|", "\\|")
        print(f"| {step} | {seconds:.1f} | {text} |", flush=True)
        self.begin()


class Newcomer:
    """An environment with nothing but the wheel.

    Args:
        folder: for all that is made.
        wheel: of mixedkv.
    """

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder, self._wheel = folder, wheel
        self.bin = folder / "venv" / "bin"
        self.env = {
            "XDG_CACHE_HOME": str(folder / "cache"),
            "LLM_USER_PATH": str(folder / "llm"),
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
        }

    def make(self) -> None:
        subprocess.run([sys.executable, "-m", "venv", self.folder / "venv"], check=True)

    def run(self, *command: str, text: str | None = None) -> tuple[str, str]:
        """Return stdout and stderr."""
        done = subprocess.run(
            command,
            env={**os.environ, **self.env},
            cwd=self.folder,
            input=text,
            stdin=None if text is not None else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=10 * PATIENCE,
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout.strip(), done.stderr.strip()

    def install(self, extras: str) -> None:
        self.run(str(self.bin / "pip"), "install", "-q", f"{self._wheel}{extras}")

    def chat(self, *options: str) -> Terminal:
        command = ["chat", "-m", "smollm2", "--temp", "0", *options]
        return Terminal(command, self.env, python=str(self.bin / "python"), size=_SIZE)

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Serve, and stop at the end."""
        port = 18411
        options = ["-m", "smollm2", "--port", str(port), "--store", "kv-cache", "--embeddings"]
        command = [str(self.bin / "mixedkv"), "serve", *options]
        log = (self.folder / "serve.log").open("w")
        process = subprocess.Popen(command, env={**os.environ, **self.env}, cwd=self.folder, stderr=log)
        url = f"http://127.0.0.1:{port}"
        try:
            wait_for(lambda: _is_ready(url))
            yield url
        finally:
            process.terminate()
            process.wait(PATIENCE)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def _first_steps(record: Record, newcomer: Newcomer) -> None:
    newcomer.make()
    record.begin()
    newcomer.install("")
    record.row("`pip install mixedkv-*.whl`", "the compiler is not asked for")
    _, said = newcomer.run("mixedkv", "pull", "smollm2")
    record.row("`mixedkv pull smollm2`", said.splitlines()[-1] if said else "93 MB")
    answer, speed = newcomer.run(
        "mixedkv", "run", "-m", "smollm2", "--temp", "0", "-n", "32", "Name three colours."
    )
    record.row('`mixedkv run -m smollm2 "Name three colours."`', f"“{answer}” and {speed.splitlines()[-1]}")


def _chat(record: Record, newcomer: Newcomer, picture: Callable[[str, str], None]) -> None:
    history = str(newcomer.folder / "notes")
    with newcomer.chat("--history", history) as terminal:
        time.sleep(0.3)
        record.begin()
        terminal.press(_CTRL_C)
        code = terminal.end()
        record.row(
            "Ctrl-C while `mixedkv chat` loads the model",
            "it ends at once" if code in (130, -signal.SIGINT) else f"exit status {code}",
        )
    with newcomer.chat("--history", history, "-n", "200") as terminal:
        terminal.expect(">")
        record.row("`mixedkv chat -m smollm2 --history notes`", "a prompt")
        terminal.press("List three uses of a lamp, in markdown.\r")
        terminal.expect("first token after")
        record.row("the first question", _last(terminal, "first token after"))
        terminal.press("/kv\r")
        terminal.expect("bits ")
        record.row("`/kv`", _last(terminal, "bits "))
        picture("first-hour-chat", terminal.raw)
        terminal.paste(_PASTED + "Behind which door is the lamp of mill 3?")
        terminal.press("\r")
        terminal.expect("first token after", 2)
        record.row(
            "a paste of 200 lines and a question, as one message", _last(terminal, "first token after")
        )
        terminal.press("Once more, please.\r")
        terminal.expect("first token after", 3)
        record.row("the next question", _last(terminal, "first token after"))
        terminal.press("Write a long story about a lamp.\r")
        time.sleep(3)
        record.begin()
        terminal.press(_CTRL_C)
        terminal.expect(r"\[stopped")
        record.row("Ctrl-C in an answer", _last(terminal, "stopped"))
        terminal.press("/undo\r")
        terminal.expect(r"\[taken back")
        record.row("`/undo`", _last(terminal, "taken back"))
        terminal.paste(_PASTED.replace("lamp", "rope") + "What is kept there?")
        terminal.press("\r")
        time.sleep(0.7)
        record.begin()
        terminal.press(_CTRL_C)
        terminal.expect(r"\[stopped before", 1)
        record.row("Ctrl-C while a pasted prompt is evaluated", _last(terminal, "stopped before"))
        terminal.press(_CTRL_D)
        terminal.end()
    record.begin()
    with newcomer.chat("--history", history, "-n", "24") as terminal:
        terminal.expect(r"Once more, please(?s:.*)>[\s\b]*$")
        record.row("the same command again", "the last messages, and a prompt")
        terminal.press("And the lamp of mill 4?\r")
        terminal.expect("first token after")
        record.row("a question about what was pasted before", _last(terminal, "first token after"))
        picture("first-hour-again", terminal.raw)
        terminal.press(_CTRL_D)
        terminal.end()


def _last(terminal: Terminal, word: str) -> str:
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]", "", terminal.raw).replace("\r", "\n")
    return next(line.strip() for line in reversed(plain.splitlines()) if word in line)


def _clients(record: Record, url: str) -> None:
    ask = [{"role": "user", "content": "Name three colours."}]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model="smollm2",
        messages=ask,
        stream=True,
        temperature=0,
        max_tokens=32,  # type: ignore[arg-type]
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    record.row("`openai`, a stream", f"“{text}”")
    again = client.chat.completions.create(model="smollm2", messages=ask, temperature=0, max_tokens=32)  # type: ignore[arg-type]
    assert again.usage is not None
    assert again.choices[0].message.content == text
    details: Any = again.usage.prompt_tokens_details
    record.row(
        "the same again",
        f"the same text; {details.cached_tokens} of {again.usage.prompt_tokens} tokens were there",
    )
    vector = client.embeddings.create(model="smollm2", input="a lamp").data[0].embedding
    record.row("`openai`, an embedding", f"{len(vector)} numbers")
    message = anthropic.Anthropic(base_url=url, api_key="none").messages.create(
        model="smollm2",
        messages=ask,  # type: ignore[arg-type]
        max_tokens=32,
        extra_body={"temperature": 0},
    )
    record.row("`anthropic`", f"“{getattr(message.content[0], 'text', '')}”")
    answer = ollama.Client(host=url).chat(
        "smollm2:latest", ask, options={"temperature": 0, "num_predict": 32}
    )
    record.row("`ollama`", f"“{answer.message.content}”")
    said = httpx.post(
        f"{url}/completion", json={"prompt": "The sky is", "n_predict": 4, "temperature": 0}
    ).json()
    record.row("llama-server's `/completion`", f"“{said['content']}”")


def _page(record: Record, url: str, pictures: Path) -> None:
    with sync_playwright() as driver:
        browser = launch(driver)
        for name, size in (("wide", {"width": 1100, "height": 720}), ("phone", PHONE)):
            page = browser.new_page(viewport=size)
            record.begin()
            page.goto(url)
            _ask(page, "Say hello in one word.")
            record.row(f"the chat page, {name}", "an answer")
            page.screenshot(path=pictures / f"first-hour-page-{name}.png")
        browser.close()


def _ask(page: Page, text: str) -> None:
    page.fill("textarea", text)
    page.keyboard.press("Enter")
    page.wait_for_function(
        "() => document.body.innerText.includes('tokens') && [...document.querySelectorAll('button')]"
        ".every(b => b.textContent !== 'Stop' || !b.checkVisibility())",
        timeout=1000 * PATIENCE,
    )


def _other_tools(record: Record, newcomer: Newcomer) -> None:
    newcomer.install("[llm]")
    record.begin()
    answer, _ = newcomer.run(
        "llm",
        "-m",
        "mixedkv/smollm2",
        "-o",
        "temperature",
        "0",
        "-o",
        "max_tokens",
        "24",
        "Name three colours.",
    )
    record.row("`llm -m mixedkv/smollm2`, in its own process", f"“{answer}”")
    answer, _ = newcomer.run("llm", "-c", "And a fourth?")
    record.row("`llm -c`, the conversation goes on", f"“{answer}”")


def _drawer(pictures: Path) -> Callable[[str, str], None]:
    """Draws what stands on a terminal as a picture."""

    def draw(name: str, raw: str) -> None:
        screen = pyte.Screen(_SIZE[1], _SIZE[0])
        pyte.Stream(screen).feed(raw)
        n = max(y for y, line in enumerate(screen.display) if line.strip()) + 1
        rows = [[screen.buffer[y][x] for x in range(_SIZE[1])] for y in range(n)]
        lines = ["".join(map(_cell, row)) for row in rows]
        style = "margin:0;padding:14px;display:inline-block;font:14px/1.35 monospace;background:#1c1c1c"
        with sync_playwright() as driver:
            page = launch(driver).new_page(viewport={"width": 900, "height": 640})
            page.set_content(f"<body style='margin:0'><pre style='{style}'>{chr(10).join(lines)}</pre>")
            page.locator("pre").screenshot(path=pictures / f"{name}.png")

    return draw


def _cell(char: Any) -> str:
    colour = _COLOURS.get(char.fg, char.fg if char.fg.isalpha() else f"#{char.fg}")
    weight = ";font-weight:bold" if char.bold else ""
    return f"<span style='color:{colour}{weight}'>{html.escape(char.data)}</span>"


def _processor() -> str:
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"an {found[1]}" if found else "this machine"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--pictures", type=Path, required=True)
    options = parser.parse_args()
    print(_HEAD.format(cores=os.cpu_count(), cpu=_processor()))
    with tempfile.TemporaryDirectory() as folder:
        newcomer, record = Newcomer(Path(folder), options.wheel.resolve()), Record()
        _first_steps(record, newcomer)
        _chat(record, newcomer, _drawer(options.pictures))
        newcomer.install("[server]")
        record.begin()
        with newcomer.serving() as url:
            record.row("`mixedkv serve -m smollm2 --store kv-cache`", "it is ready")
            _clients(record, url)
            _page(record, url, options.pictures)
        record.begin()
        with newcomer.serving() as url:
            record.row("stopped and started again", "it is ready")
            answer = httpx.post(
                f"{url}/v1/chat/completions",
                json={
                    "messages": [{"role": "user", "content": "Name three colours."}],
                    "max_tokens": 32,
                    "temperature": 0,
                },
                timeout=PATIENCE,
            ).json()
            cached = answer["usage"]["prompt_tokens_details"]
            record.row(
                "the first question once more",
                f"{cached['cached_tokens']} tokens came from {cached['cached_tier']}",
            )
        _other_tools(record, newcomer)
    print(_PICTURES)


if __name__ == "__main__":
    main()
