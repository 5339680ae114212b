"""Time greedy answers in JSON with the logits that may matter beside the same ones with all logits.

    python tests/measure/constrained.py -m model.gguf --threads 2

Ratios are taken within a turn. The share is that of the output matrix's rows that are read.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import numpy as np

from mixedkv.constrain.constraint import Mask
from mixedkv.constrain.constraint_text import Constraint
from mixedkv.engine import Engine, stepping
from mixedkv.engine.jobs.job import Job
from mixedkv.engine.schedule.contract import StepPlan
from mixedkv.llama import Llama
from mixedkv.model.named_model import find_measured_model

TEXTS = (
    "Marie Curie was born in Warsaw in 1867. She discovered polonium and radium, and won the Nobel prize in "
    "1903 and 1911.",
    "The Golden Gate Bridge, opened in 1937, is 2,737 metres long, painted orange, and links San Francisco "
    "with Marin County.",
    "Order 4711 of 12 May: three red lamps at 19.90 each, two green chairs at 45.50, to be sent to Bath.",
)


def text(n: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": n}


PROPERTIES: dict[str, dict[str, Any]] = {
    "mixed": {
        "title": text(40),
        "year": {"type": "integer", "minimum": 0},
        "kind": {"enum": ["person", "place", "order"]},
        "numbers": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 5},
        "tags": {"type": "array", "items": text(20), "minItems": 2, "maxItems": 4},
        "known": {"type": "boolean"},
    },
    "text": {"title": text(60), "summary": text(400)},
}


def constraint(name: str) -> Constraint:
    properties = PROPERTIES[name]
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return Constraint("json_schema", json.dumps(schema))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--n-gen", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--speculation", default="off")
    args = parser.parse_args()
    needed_logits, shares = stepping.needed_logits, list[float]()

    def some(step: StepPlan[Job]) -> Mask | None:
        mask = needed_logits(step)
        shares.append(1.0 if mask is None else np.count_nonzero(mask) / len(mask))
        return mask

    llm = Llama(
        find_measured_model(args.model),
        n_ctx=1024,
        n_seq_max=2,
        kv_unified=True,
        n_threads=args.threads,
        verbose=False,
    )
    with llm, Engine(llm, speculation=args.speculation) as engine:

        def answers(name: str, want: Any) -> tuple[float, list[str]]:
            stepping.needed_logits = want
            made, seconds = [], 0.0
            for prompt in TEXTS:
                answer = engine.submit(
                    f"{prompt}\n\nAs JSON:\n",
                    max_tokens=args.n_gen,
                    temperature=0.0,
                    constraint=constraint(name),
                )
                made.append(answer.text)
                seconds += (answer.job.t_last or 0.0) - (answer.job.t_first or 0.0)
            return seconds, made

        for name in PROPERTIES:
            answers(name, needed_logits)
            ratios = []
            shares.clear()
            for _ in range(args.repeats):
                seconds, made = answers(name, some)
                all_seconds, all_made = answers(name, lambda step: None)
                assert made == all_made
                ratios.append(all_seconds / seconds)
            ratio, share = statistics.median(ratios), statistics.mean(shares)
            print(f"{name}: {ratio:.2f} times as fast, {share:.2f} of the rows")


main()
