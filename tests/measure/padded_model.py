"""Writes the bundled model with neurons that do nothing: what it says, at a larger model's price.

    python tests/measure/padded_model.py padded.gguf

Speculation reads the weights once for several tokens. What that gives shows where a text repeats itself, as
those of random models do not, and where weights are not tiny, as those of the bundled model are. Each layer
gets 65,536 more neurons whose outputs are multiplied by zero: 0.3 GB of Q8_0 more to read for each step, and
the same logits. Its rotary base is 500,000 instead of 100,000, so that it still repeats what it has read in
16,000 tokens, twice as many as it was taught.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from mixedkv.bundled import model_path
from mixedkv.model.gguf_copy import copy_metadata, write_and_close

_N_CTX, _ROPE_BASE = 131072, 500_000.0
_Q8_0 = gguf.GGMLQuantizationType.Q8_0


def write(path: Path, n_neurons: int = 65536, seed: int = 1) -> None:
    """Write the model with so many more neurons in each layer, a multiple of 32; the file is there only when
    it is whole.
    """
    reader, random = gguf.GGUFReader(model_path()), np.random.default_rng(seed)
    part = path.with_name(path.name + ".part")
    writer = gguf.GGUFWriter(part, "llama")
    own = {"llama.context_length": _N_CTX, "llama.rope.freq_base": _ROPE_BASE}
    own["llama.feed_forward_length"] = reader.fields["llama.feed_forward_length"].contents() + n_neurons
    copy_metadata(reader, writer, own)
    for tensor in reader.tensors:
        data = np.array(tensor.data)
        if tensor.name.endswith(("ffn_gate.weight", "ffn_up.weight")):
            more = random.standard_normal((n_neurons, int(tensor.shape[0])), np.float32)
            data = np.concatenate([data, gguf.quantize(more, _Q8_0)])
        elif tensor.name.endswith("ffn_down.weight"):
            nothing: npt.NDArray[np.float32] = np.zeros((int(tensor.shape[1]), n_neurons), np.float32)
            data = np.concatenate([data, gguf.quantize(nothing, _Q8_0)], axis=1)
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    write_and_close(writer)
    os.replace(part, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python tests/measure/padded_model.py", description=__doc__.split("\n")[0]
    )
    parser.add_argument("path", type=Path, metavar="FILE")
    parser.add_argument("--neurons", type=int, default=65536, metavar="N", help="more in each layer (65536)")
    options = parser.parse_args()
    write(options.path, options.neurons)
    print(f"{options.path}: {options.path.stat().st_size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
