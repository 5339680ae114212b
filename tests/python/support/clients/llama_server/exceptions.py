"""Tests of llama-server that `mixedkv serve` does not pass, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["absent", "differs", "ours"]


@dataclass(frozen=True)
class Known:
    """Tests that fail for one reason.

    Attributes:
        kind: "absent" is not there on purpose, "differs" is another way on purpose, "ours" is to be mended.
        tests: `file::name`, or with `*` at the end all that begin so, of which one fails at least.
    """

    kind: Kind
    reason: str
    tests: tuple[str, ...]


FILES = (
    "test_basic",
    "test_chat_completion",
    "test_compat_anthropic",
    "test_compat_gcp",
    "test_compat_oai_responses",
    "test_completion",
    "test_ctx_shift",
    "test_embedding",
    "test_ignore_eos",
    "test_infill",
    "test_kv_keep_only_active",
    "test_lora",
    "test_mcp_servers",
    "test_metrics",
    "test_proxy",
    "test_rerank",
    "test_router",
    "test_security",
    "test_sleep",
    "test_slot_save",
    "test_speculative",
    "test_stream",
    "test_template",
    "test_tokenize",
    "test_tool_call",
    "test_tools_builtin",
    "test_vision_api",
)

_IMAGES = (
    (r"What is this:\n-IMG_URL_0", "(cat)+"),
    (r"What is this:\n-IMG_URL_1", "(frog)+"),
    (r"Test test\n-IMG_URL_1", "(frog)+"),
)

EXCEPTIONS: tuple[Known, ...] = (
    Known(
        "absent",
        "Slots, and saving one by its number: `/v1/stats` lists sequences, `--store` finds prompts by tokens",
        (
            "test_basic::test_server_slots",
            "test_completion::test_cancel_request",
            "test_kv_keep_only_active::test_clear_and_restore",
            "test_metrics::test_metrics_slots_idle_after_completion",
            "test_slot_save::*",
        ),
    ),
    Known(
        "absent",
        "Tools, MCP servers and a proxy that act on the server's machine",
        (
            "test_mcp_servers::*",
            "test_proxy::*",
            "test_security::test_cors_origins_defaults_to_localhost_with_tools_enabled",
            "test_security::test_cors_proxy_only_forwards_explicit_proxy_headers",
            "test_tools_builtin::*",
        ),
    ),
    Known(
        "absent",
        "Commands to load, unload, download and delete models, and states of them: requests load models, and "
        "`--keep-alive` unloads them",
        ("test_router::*",),
    ),
    Known("absent", "Streams that are resumed after the client has gone", ("test_stream::*",)),
    Known("absent", "Google's form of a request, `/predict`", ("test_compat_gcp::*",)),
    Known(
        "absent",
        "A model that sleeps in its process: `--keep-alive` ends the process of one",
        ("test_sleep::*",),
    ),
    Known("absent", "Several addresses at once", ("test_basic::test_server_multiple_addresses",)),
    Known(
        "absent",
        "A server without its page, and a page that is installed as an app",
        (
            "test_basic::test_no_ui",
            "test_security::test_access_static_assets_without_api_key",
        ),
    ),
    Known(
        "absent",
        "Files of the server's machine as images",
        (
            "test_security::test_local_media_file[../../../tools-file://mtmd/test-1.jpeg-True]",
            "test_security::test_local_media_file[../../../tools-file:////mtmd//test-1.jpeg-True]",
        ),
    ),
    Known(
        "absent",
        "A vector for each token of an input (`--pooling none`)",
        (
            "test_embedding::test_embedding_pooling_none",
            "test_embedding::test_embedding_pooling_none_oai",
        ),
    ),
    Known(
        "absent",
        "Images that the server fetches from a URL, and that are embedded",
        (
            *(
                f"test_vision_api::test_vision_chat_completion[{case}-True-{words}]"
                for case, words in _IMAGES
            ),
            "test_vision_api::test_vision_chat_completion_token_count",
            "test_vision_api::test_vision_embeddings*",
        ),
    ),
    Known(
        "absent",
        "Drafts that are taken or not by chance, for measurements (`--spec-synth-rates`)",
        (
            "test_speculative::test_synth_is_deterministic",
            "test_speculative::test_with_and_without_draft",
        ),
    ),
    Known(
        "differs",
        "Metrics have names of their own, and are always there",
        (
            "test_metrics::test_metrics_disabled",
            "test_metrics::test_metrics_embedding_prompt_is_counted",
            "test_metrics::test_metrics_predicted_total_matches_requests",
            "test_metrics::test_metrics_prometheus_format",
            "test_metrics::test_metrics_prompt_processed_and_cached",
        ),
    ),
    Known(
        "differs",
        "`/v1/models` tells what a model can do in `data[].meta.capabilities`, and has no second list",
        (
            "test_vision_api::test_models_supports_multimodal_capability",
            "test_vision_api::test_v1_models_supports_multimodal_capability",
        ),
    ),
    Known(
        "differs",
        "An adapter is a model with one strength, which `lora` in a request chooses; it is not set for all",
        ("test_lora::*",),
    ),
    Known(
        "differs",
        "CORS: with keys pages of every site may call (`*`), without cookies; without keys others get a 403 "
        "that names `--allow`",
        ("test_security::test_cors_options*", "test_security::test_cors_origins_localhost_*"),
    ),
    Known(
        "differs",
        "`/completions` without `/v1` is OpenAI's, for clients that leave `/v1` out; llama-server's form is "
        "`/completion`",
        (
            "test_security::test_correct_api_key",
            "test_security::test_correct_api_key_anthropic_header",
            "test_vision_api::test_vision_completion*",
        ),
    ),
    Known(
        "differs",
        "A name with commas is one name; a server of one model answers to any",
        ("test_basic::test_server_model_aliases_and_tags",),
    ),
    Known(
        "differs",
        "`ignore_eos`, as in vLLM: what would end the answer may come, and does not",
        ("test_ignore_eos::test_ignore_eos_populates_logit_bias",),
    ),
    Known(
        "differs",
        "Progress of a prompt is told twice a second, not for each batch",
        (
            "test_chat_completion::test_return_progress[64-4-False]",
            "test_metrics::test_metrics_timings_on_prompt_progress",
        ),
    ),
    Known(
        "differs",
        "Empty inputs are refused, as in OpenAI's and Anthropic's APIs",
        (
            "test_compat_anthropic::test_anthropic_empty_messages",
            "test_embedding::test_embedding_mixed_input[-False]",
        ),
    ),
    Known(
        "differs",
        "What the model cannot see is the client's mistake, a 400",
        (
            "test_compat_anthropic::test_anthropic_tool_result_with_image",
            "test_compat_anthropic::test_anthropic_vision_format_accepted",
        ),
    ),
    Known(
        "differs",
        "A response that `max_output_tokens` cuts ends with `response.incomplete`, as in OpenAI's API",
        ("test_compat_oai_responses::test_responses_stream_with_llama_telemetry",),
    ),
    Known(
        "differs",
        "Parts of a message's text are one text, without lines between them",
        (r"test_chat_completion::test_chat_template_assistant_prefill[prefill1-Wh\n\nill]",),
    ),
    Known(
        "differs",
        "A template goes by the name of one of llama-cpp-python's formats, or is given as a file",
        ("test_chat_completion::test_apply_chat_template",),
    ),
    Known(
        "differs",
        "Two assistant messages at the end are the template's business",
        ("test_chat_completion::test_invalid_chat_completion_req[messages7]",),
    ),
    Known(
        "differs",
        "The model in place of that of the Hub has random weights, and knows nothing",
        ("test_rerank::test_rerank", "test_rerank::test_rerank_tei_format"),
    ),
    Known(
        "differs",
        "`add_generation_prompt: false` is refused: a rendered chat has the beginning of the answer",
        (
            "test_template::test_add_generation_prompt[meta-llama-Llama-3.3-70B-Instruct-"
            "<|start_header_id|>assistant<|end_header_id|>-False]",
        ),
    ),
)


def matches(name: str, test: str) -> bool:
    """Return whether an exception's name is that of a test."""
    return test.startswith(name[:-1]) if name.endswith("*") else test == name


def known(test: str) -> Known | None:
    """Return why a test fails, None if nobody knows."""
    return next((each for each in EXCEPTIONS if any(matches(name, test) for name in each.tests)), None)


def table() -> Iterator[str]:
    """Yield the lines of docs/features.md about them."""
    yield "| what the tests ask for | why not | tests |\n|---|---|---|"
    kinds = {"absent": "not there on purpose", "differs": "another way on purpose", "ours": "to be mended"}
    for kind, words in kinds.items():
        for each in (each for each in EXCEPTIONS if each.kind == kind):
            names = ", ".join(f"`{name}`".replace("|", "\\|") for name in each.tests)
            yield f"| {each.reason} | {words} | {names} |"
