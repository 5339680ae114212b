"""Adapts llama-server's tests: the program, the models, and the numbers and words that follow from these.

What a test asks for stays: fields, statuses, types of errors, order of events.
"""

from __future__ import annotations

import re
from pathlib import Path

_KEPT = (r'"\"42\""', r'"\"foooooo\""', '"a{5,5}"')  # words that a grammar forces, of whatever model
_WORDS = f"""_FORCED = {{{", ".join(_KEPT)}}}


def match_regex(regex: str, text: str) -> bool:
    if regex in _FORCED:
        return re.search(regex, text, RegexFlag.IGNORECASE | RegexFlag.DOTALL) is not None
    if regex.startswith("(\\\\{{"):  # an object
        return text.lstrip().startswith("{{")
    return isinstance(text, str) and len(text) > 0  # words of another model


"""
_DOWNLOAD = """def download_file(url: str, output_file_path: str | None = None) -> str:
    return peer.file_of(url)


"""
_START = """        self.process = peer.start(self, [str(arg) for arg in server_args], env)
"""
_CONFTEST = """
@pytest.fixture(scope="session", autouse=True)
def image_site():
    with peer.site():
        yield
"""
_EVERYWHERE = (  # of each file of tests
    # as many tokens as another vocabulary makes
    (r"== n_prompt\b", "== peer.SOME"),
    (r'(\["prompt_n"\]|\["prompt_tokens"\]) == (?:[1-9]\d*|n_tokens)\b', r"\1 == peer.SOME"),
    (r"(\['prompt_tokens'\]) == (?:n_tokens|2 \* 9)", r"\1 == peer.SOME"),
    (r"n_prompt = \(40 \+ r\)\*5 \+ 2", "n_prompt = peer.SOME"),
    (r'\["cached_tokens"\] == n_cache', '["cached_tokens"].__gt__(0) == (n_cache > 0)'),
    (r'"Hello " \* 248', '"t" * 248'),
    # the context is one pool that all answers share
    (r"server\.n_ctx //? server\.n_slots", "server.n_ctx"),
    (r"server\.n_ctx = 512\n    server\.n_slots = 2", "server.n_ctx = 256"),
    (r"== n_token_output\b", "== peer.SOME"),
    # the program's name
    (r'(system_fingerprint(?:"\])?)\.startswith\("b"\)', r'\1.startswith("mixedkv")'),
    # OpenAI's first event of a chat has no text, which is an empty one there
    (r'(\["delta"\]\["content"\]|\.delta\.content) is None', r'\1 in (None, "")'),
    # images come from this machine
    (r'"https://huggingface\.co/[^"]*/11_truck\.png"', 'f"{peer.URL}/img0.png"'),
    (r'"https://huggingface\.co/[^"]*/91_cat\.png"', 'f"{peer.URL}/img1.png"'),
)


def adapt(folder: Path) -> None:
    """Adapt the tests in a folder in place.

    Raises:
        ValueError: they are not those that this was written for.
    """
    _adapt_utils(folder / "utils.py")
    conftest = folder / "conftest.py"
    text = conftest.read_text("utf-8")
    before, found, _ = text.partition(
        '@pytest.fixture(scope="session", autouse=True)\ndef load_server_presets'
    )
    if not found:
        raise ValueError(
            "conftest.py of llama-server's tests is another one: adapt.py is to be looked through"
        )
    before = before.replace("from filelock import FileLock\n", "")
    conftest.write_text(f"{before}from support.clients.llama_server import peer\n{_CONFTEST}", "utf-8")
    for path in sorted((folder / "unit").glob("test_*.py")):
        text = path.read_text("utf-8")
        for pattern, instead in _EVERYWHERE:
            text = re.sub(pattern, instead, text)
        path.write_text(
            text.replace(
                "from utils import *", "from support.clients.llama_server import peer\nfrom utils import *"
            ),
            "utf-8",
        )


def _adapt_utils(path: Path) -> None:
    text = path.read_text("utf-8")
    text = _between(text, "def match_regex(", "def download_file(", _WORDS)
    text = _between(text, "def download_file(", "def is_slow_test_allowed", _DOWNLOAD)
    text = _between(text, "        if self.log_path:\n", "        server_instances.add(self)\n", _START)
    text = text.replace("import wget\n", "from support.clients.llama_server import peer\n")
    begun = "if choice['delta'].get('content') is not None"  # OpenAI's first event has an empty text
    text = text.replace(f"{begun}:", f"{begun} and 'role' not in choice['delta']:")
    for method in ("make_request", "make_stream_request"):
        text = re.sub(
            rf"(def {method}\((?:.|\n)*?        url = self\.make_url\(path, host\)\n)",
            r"\1        data = peer.body(self, path, data)\n",
            text,
            count=1,
        )
    path.write_text(text, "utf-8")


def _between(text: str, begin: str, end: str, instead: str) -> str:
    """Return a text with what is from one place up to another replaced."""
    first, last = text.find(begin), text.find(end)
    if not 0 <= first < last:
        raise ValueError(
            f"llama-server's tests have no {begin!r} before {end!r}: adapt.py is to be looked through"
        )
    return text[:first] + instead + text[last:]
