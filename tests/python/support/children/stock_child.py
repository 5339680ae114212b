"""Child process of test_stock_identity.py: decodes a fixed plan and writes logits and states to an .npz file.

    stock_child.py {ours|stock} OUT.npz MODEL.gguf...

"ours" imports mixedkv first and so runs on its libllama; "stock" runs on the one that came with llama_cpp.
"""

import os
import sys

if sys.argv[1] == "ours":
    import mixedkv  # noqa: F401

import numpy as np

from support.cache.harness import Ctx, InitError, Model, Uniform, prompt

CACHES = {
    "f16": Uniform(),
    "f16-plain": Uniform(flash=False),
    "q8_0": Uniform(k="q8_0", v="q8_0"),
    "q4_0": Uniform(k="q4_0", v="q4_0"),
}


def loaded_libraries() -> list[str]:
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if ".so" in line}
    return sorted(p for p in paths if os.path.basename(p).startswith(("libllama", "libggml")))


def plan(ctx: Ctx, movable: bool) -> dict[str, np.ndarray]:
    """A prompt, single tokens, another sequence, and, where the model can, a context shift, a copy and
    a state.
    """
    tokens = prompt(200, seed=21)
    out = {"prompt": ctx.decode(tokens[:100]), "single": ctx.decode(tokens[100:101])}
    out["second"] = ctx.decode(tokens[100:130], seq_ids=1)
    out["both"] = ctx.decode(
        tokens[150:160], positions=[*range(101, 106), *range(30, 35)], seq_ids=[[0]] * 5 + [[1]] * 5
    )
    if movable:
        ctx.context_shift(4, 40)
        out["shifted"] = ctx.decode(tokens[160:170])
    ctx.cp(0, 1)
    out["copied"] = ctx.decode(tokens[170:175], seq_ids=1)
    out["state"] = np.frombuffer(ctx.save_seq(0), dtype=np.uint8)
    return out


def main() -> None:
    out: dict[str, np.ndarray] = {"libraries": np.array(loaded_libraries())}
    for path in sys.argv[3:]:
        name = os.path.basename(path).removesuffix(".gguf")
        # GCC before 13.3 miscompiles llama.cpp's AMX kernels, which then crash on quantised weights
        model = Model(path, extra_buffers=False)
        for cache, kv in CACHES.items():
            # llama.cpp itself crashes on a shift of quantised K with a head size that it does not rotate
            movable = not (name in ("llama-96", "deepseek2") and cache.startswith("q"))
            try:
                with Ctx(model, kv, n_ctx=512, n_ubatch=32, n_seq_max=2) as ctx:
                    results = plan(ctx, movable)
            except InitError:
                results = {"refused": np.zeros(0)}
            out |= {f"{name}/{cache}/{key}": value for key, value in results.items()}
        model.close()
    np.savez(sys.argv[2], **out)


main()
