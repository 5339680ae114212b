"""lm-evaluation-harness scores a task against /v1/completions: its numbers are those of a `Llama`.

It needs many packages, so it may have an environment of its own: MIXEDKV_TEST_LM_EVAL is the Python there,
where `pip install 'lm-eval[api]'` was run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from support.server_support import running

pytestmark = pytest.mark.nightly

PYTHON = os.environ.get("MIXEDKV_TEST_LM_EVAL", sys.executable)
BOUND = 0.05  # nats of a continuation: rounding, as the harness lets several prompts be evaluated together
QUESTIONS = [
    (f"The code of the {name} is {code}. Later they asked again: the code of the {name} is", code)
    for name, code in (("mill", 4817), ("harbour", 1203), ("tower", 9921), ("bridge", 3350), ("farm", 7066))
]
CHOICES = [f" {code}" for code in (4817, 1203, 9921, 3350, 7066)]
TASK = """
task: codes
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
"""
HARNESS = """
import json, sys
import lm_eval, requests
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

url, folder = sys.argv[1:]

class Client(LocalCompletionsAPI):
    def tok_encode(self, string, **options):
        return requests.post(url + "/tokenize", json={"content": string}).json()["tokens"]

options = {"tokenizer_backend": None, "num_concurrent": 4, "max_retries": 1}
client = Client(base_url=url + "/v1/completions", model="m", **options)
client.tokenizer, client.tokenized_requests = "the server's", True
tasks = TaskManager(include_path=folder, include_defaults=False)
found = lm_eval.simple_evaluate(client, tasks=["codes"], task_manager=tasks, log_samples=True)
samples = sorted(found["samples"]["codes"], key=lambda sample: sample["doc_id"])
scores = [[[float(x), bool(y)] for x, y in sample["filtered_resps"]] for sample in samples]
print(json.dumps({"acc": found["results"]["codes"]["acc,none"], "scores": scores}))
"""


def has_harness() -> bool:
    return not subprocess.run([PYTHON, "-c", "import lm_eval"], capture_output=True, check=False).returncode


def score(llm: Llama, question: str, choice: str) -> tuple[float, bool]:
    """Return the log-probability of a continuation, and whether each of its tokens is the likeliest."""
    whole = llm.tokenize((question + choice).encode(), add_bos=False)
    n = len(llm.tokenize(question.encode(), add_bos=False))
    llm.reset()
    llm.eval(whole)
    logits = llm.scores[n - 1 : len(whole) - 1].astype(np.float64)
    each = logits[range(len(whole) - n), whole[n:]] - np.log(np.exp(logits).sum(1))
    return float(each.sum()), bool((logits.argmax(1) == whole[n:]).all())


def test_a_harness_gets_the_numbers_of_a_llama(tmp_path: Path) -> None:
    if not has_harness():
        pytest.skip("lm-eval[api] is not installed; see above")
    docs = [{"question": q, "choices": CHOICES, "answer": CHOICES.index(f" {code}")} for q, code in QUESTIONS]
    (tmp_path / "codes.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (tmp_path / "codes.yaml").write_text(TASK.format(file=tmp_path / "codes.jsonl"))
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    with running("--n-ctx", "2048", "--kv", "f16") as server:
        command = [PYTHON, "-c", HARNESS, server.url, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    with Llama(model_path(), kv="f16", n_ctx=512, n_threads=1, logits_all=True, verbose=False) as llm:
        expected = [[score(llm, doc["question"], choice) for choice in CHOICES] for doc in docs]
    got = np.array([[value for value, _ in row] for row in found["scores"]])
    wanted = np.array([[value for value, _ in row] for row in expected])
    assert np.abs(got - wanted).max() < BOUND
    assert [[best for _, best in row] for row in found["scores"]] == [
        [best for _, best in row] for row in expected
    ]
    right = wanted.argmax(1) == [doc["answer"] for doc in docs]
    assert found["acc"] == pytest.approx(right.mean())
    assert right.any()
