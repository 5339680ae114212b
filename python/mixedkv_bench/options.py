"""Options of a run, checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mixedkv.bundled import model_path
from mixedkv.chunks import Repair
from mixedkv.model.footprint import ModelShape
from mixedkv.model.gguf_file import ModelFile
from mixedkv.streaming.layer_choice import Asked
from mixedkv.streaming.streaming import Mode as StreamMode
from mixedkv_bench.harness.cache_settings import Setting
from mixedkv_bench.harness.reuse_cases import DonorKind, Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """A checked request; `n_ctx` is the context of quality, and for each client of serve if it was given."""

    tests: tuple[str, ...]
    file: ModelFile
    shape: ModelShape
    settings: tuple[Setting, ...]
    depths: tuple[int, ...]
    n_ctx: int
    n_ctx_recall: int
    n_ctx_client: int | None
    n_prompt: int
    n_new: int
    n_gen: int
    turns: int
    clients: tuple[int, ...]
    replicas: tuple[int, ...]
    folder: Path | None
    remote: str | None
    threads: int
    busy: int
    repeats: int
    fill: str
    sequences: int
    modes: tuple[str, ...]
    text: str | None
    text_source: str
    budget: int | None
    bits: tuple[float, ...]
    memory: tuple[int, ...]
    stream_layers: Asked
    stream_modes: tuple[StreamMode, ...]
    peer: bool
    peer_path: Path | None
    peer_settings: tuple[Setting, ...]
    workloads: tuple[Workload, ...]
    n_documents: int
    donors: tuple[DonorKind, ...]
    repairs: tuple[Repair, ...]
    calibrate: bool
    max_kld: float
    kvboost: str
    draft_model: Path | None
    json: Path | None
    plot: Path | None

    @property
    def is_bundled(self) -> bool:
        return self.file.path == model_path()
