"""Measure KVBoost on passages in another place of a prompt: the cases of `mixedkv bench reuse`.

python tests/measure/kvboost/passages.py -m smollm2:f16 --kvboost PYTHON --workload prose --n-prompt 1400

What it is compared with is its own full evaluation, in F32.
"""

from __future__ import annotations

import argparse
import statistics

from kvboost_peer import KVBoost

from mixedkv.model.named_model import find_measured_model
from mixedkv_bench.harness.contexts import LoadedModel
from mixedkv_bench.harness.reuse_cases import WORKLOADS, CaseMaker

_N_ANSWER = 28


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2:f16")
    parser.add_argument("--kvboost", metavar="PYTHON", required=True, help="of an environment with kvboost")
    parser.add_argument("--workload", choices=WORKLOADS, default="prose")
    parser.add_argument("--donor", default="alone")
    for name, default in (("n-prompt", 1400), ("documents", 4), ("repeats", 4), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    path = find_measured_model(args.model)
    model = LoadedModel(path)
    head = [model.bos] if model.adds_bos else []
    maker = CaseMaker(
        lambda text: model.tokenize(text, special=True) if text else [], head, args.n_prompt, args.documents
    )
    with KVBoost(args.kvboost, path, args.threads) as peer:
        cases = (maker.make(args.workload, args.donor, seed) for seed in range(args.repeats))
        found = [peer.measure(case.prompt, case.stored, _N_ANSWER) for case in cases]
    ratio = statistics.median(each["seconds"] / each["seconds_cold"] for each in found)
    reused, kld, same = (
        statistics.mean(each[key] for each in found) for key in ("reused", "kld", "same_top1")
    )
    print(
        f"kvboost {peer.version}: {reused:.0%} reused, first token {ratio:.0%} of cold, "
        f"KLD {kld:.2g}, same {same:.0%}"
    )


if __name__ == "__main__":
    main()
