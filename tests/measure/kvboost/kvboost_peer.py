"""KVBoost beside this package's reuse, on the same weights and token ids.

It needs torch and transformers, which this package does not, so it runs in an environment of its own.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mixedkv.tokens import Tokens
from mixedkv_bench.harness.contexts import CannotRunError

_CHILD = Path(__file__).with_name("kvboost_child.py")


class KVBoost:
    """A process of KVBoost. Its model has the weights of a GGUF file of the llama architecture, in F32.

    Args:
        python: of an environment with kvboost, torch, transformers and gguf.

    Attributes:
        version: of kvboost.

    Raises:
        ValueError: it does not start.
    """

    def __init__(self, python: str, model: Path, threads: int) -> None:
        command = [python, str(_CHILD), str(model), str(threads)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            self.version = str(self._read()["version"])
        except (OSError, CannotRunError) as error:
            raise ValueError(f"--kvboost {python}: {error}. It needs kvboost, transformers, gguf") from None

    def measure(self, prompt: Tokens, stored: Sequence[Tokens], n_answer: int) -> dict[str, Any]:
        """Measure one case, evaluated fully and with reuse of what was stored: seconds, seconds_cold, reused,
        kld (of the first token, from its own full evaluation), same_top1, tokens, tokens_cold.

        Raises:
            CannotRunError: it cannot.
        """
        request = {
            "prompt": prompt.tolist(),
            "stored": [each.tolist() for each in stored],
            "n_answer": n_answer,
        }
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # its end says why
            print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise CannotRunError(f"it ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise CannotRunError(answer["error"])
        return answer

    def close(self) -> None:
        """Close the peer: the end of its input ends it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def __enter__(self) -> KVBoost:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
