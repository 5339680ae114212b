"""The arguments that llama-cpp-python's calls take, so that a type checker finds one that is misspelt.

Their meanings and defaults are llama-cpp-python's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from llama_cpp import (
        ChatCompletionFunction,
        ChatCompletionRequestFunctionCall,
        ChatCompletionRequestResponseFormat,
        ChatCompletionTool,
        ChatCompletionToolChoiceOption,
        LogitsProcessorList,
        StoppingCriteriaList,
    )
    from llama_cpp.llama_chat_format import LlamaChatCompletionHandler
    from llama_cpp.llama_grammar import LlamaGrammar
    from llama_cpp.llama_speculative import LlamaDraftModel
    from llama_cpp.llama_tokenizer import BaseLlamaTokenizer


class LlamaOptions(TypedDict, total=False):
    """Arguments of `llama_cpp.Llama` that `mixedkv.Llama` has no argument of its own for."""

    n_gpu_layers: int
    split_mode: int
    main_gpu: int
    tensor_split: list[float] | None
    vocab_only: bool
    use_mmap: bool
    use_mlock: bool
    kv_overrides: dict[str, bool | int | float | str] | None
    seed: int
    n_batch: int
    n_ubatch: int
    n_threads: int | None
    n_threads_batch: int | None
    rope_scaling_type: int | None
    pooling_type: int
    attention_type: int
    rope_freq_base: float
    rope_freq_scale: float
    yarn_ext_factor: float
    yarn_attn_factor: float
    yarn_beta_fast: float
    yarn_beta_slow: float
    yarn_orig_ctx: int
    logits_all: bool
    offload_kqv: bool
    op_offload: bool | None
    swa_full: bool | None
    no_perf: bool
    last_n_tokens_size: int
    lora_base: str | None
    lora_scale: float
    lora_path: str | None
    numa: bool | int
    chat_format: str | None
    chat_handler: LlamaChatCompletionHandler | None
    draft_model: LlamaDraftModel | None
    tokenizer: BaseLlamaTokenizer | None
    spm_infill: bool
    verbose: bool


class _CommonOptions(TypedDict, total=False):
    max_tokens: int | None
    temperature: float
    top_p: float
    min_p: float
    typical_p: float
    stop: str | list[str] | None
    frequency_penalty: float
    presence_penalty: float
    repeat_penalty: float
    top_k: int
    seed: int | None
    tfs_z: float
    mirostat_mode: int
    mirostat_tau: float
    mirostat_eta: float
    model: str | None
    logits_processor: LogitsProcessorList | None
    grammar: LlamaGrammar | None
    logit_bias: dict[int, float] | None


class CompletionOptions(_CommonOptions, total=False):
    """Arguments of `create_completion` besides the prompt and `stream`."""

    suffix: str | None
    logprobs: int | None
    echo: bool
    stopping_criteria: StoppingCriteriaList | None


class ChatOptions(_CommonOptions, total=False):
    """Arguments of `create_chat_completion` besides the messages and `stream`."""

    functions: list[ChatCompletionFunction] | None
    function_call: ChatCompletionRequestFunctionCall | None
    tools: list[ChatCompletionTool] | None
    tool_choice: ChatCompletionToolChoiceOption | None
    response_format: ChatCompletionRequestResponseFormat | None
    logprobs: bool | None
    top_logprobs: int | None
