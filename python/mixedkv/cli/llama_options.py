"""Options of llama.cpp that this program does not have, and what to write instead."""

INSTEAD = {
    **dict.fromkeys(
        ("-fa", "--flash-attn"), "attention over quantised rows is fused unless --kv says attention=merged"
    ),
    **dict.fromkeys(("-cnv", "--conversation", "-i", "--interactive"), "`mixedkv chat` is the conversation"),
    **dict.fromkeys(("-no-cnv", "--no-conversation"), "`mixedkv run` answers once, --raw continues a text"),
    **dict.fromkeys(("-sys", "--system", "--system-prompt"), "`mixedkv chat --system TEXT` has one"),
    **dict.fromkeys(("--no-mmap", "--mlock"), "--stream-layers and --memory say how weights are read"),
    **dict.fromkeys(
        ("--grammar", "--grammar-file", "-j", "--json-schema"), "a request to `mixedkv serve` brings its own"
    ),
    **dict.fromkeys(("-np", "--parallel", "--alias", "--api-key"), "that is for `mixedkv serve`"),
    "--image": "`mixedkv run` has it, a chat `/image FILE`, and requests bring theirs",
    **dict.fromkeys(("--chat-template", "--chat-template-file"), "write --chat-format FILE"),
    "--color": "answers on a terminal have colours",
    **dict.fromkeys(("--hf-file", "-hff"), "write -m hf:OWNER/REPO:FILE"),
    **dict.fromkeys(("--hf-token", "-hft"), "set the variable HF_TOKEN"),
    "-hfr": "write -hf OWNER/REPO",
    **dict.fromkeys(("--model-url", "-mu", "--docker-repo", "-dr"), "`mixedkv pull` downloads a model"),
    **dict.fromkeys(("--mmproj-url", "-mmu"), "write --mmproj FILE; a model of the hub finds its encoder"),
    "-mm": "write --mmproj FILE",
    "--offline": "set the variable HF_HUB_OFFLINE=1",
    **dict.fromkeys(("-jf", "--json-schema-file"), "a request to `mixedkv serve` brings its own"),
}

OF_SERVER = {  # of `mixedkv serve`, in which they mean something else than where one prompt is answered
    **dict.fromkeys(("-n", "--n-predict", "--predict"), "each request says its max_tokens"),
    **dict.fromkeys(("-md", "--model-draft", "--spec-draft-model"), "write --speculation FILE"),
    "--spec-type": "write --speculation prompt-lookup, mtp or the FILE of a draft model",
    **dict.fromkeys(
        (
            *("--draft", "--draft-n", "--draft-max", "--draft-min", "--draft-n-min", "--draft-p-min"),
            *("--spec-draft-n-max", "--spec-draft-n-min", "--spec-draft-p-min"),
        ),
        "how much is drafted follows from how often drafts were right",
    ),
    "--embedding": "write --embeddings",
    **dict.fromkeys(
        ("--rerank", "--reranking", "--pooling"), "a model that ranks or embeds is known by its file"
    ),
    **dict.fromkeys(
        ("-cb", "--cont-batching", "--metrics", "--webui", "--ui", "--cache-prompt"), "it is always there"
    ),
    **dict.fromkeys(("-nocb", "--no-cont-batching"), "requests are always batched"),
    **dict.fromkeys(("--no-webui", "--no-ui"), "the chat page is always there, at /"),
    "--slots": "/v1/stats lists sequences",
    "--no-slots": "there are no slots",
    "--cache-reuse": "write --reuse chunks",
    **dict.fromkeys(("--timeout", "-to"), "write --request-timeout S or --read-timeout S"),
    "--ssl-key-file": "write --tls-key FILE",
    "--ssl-cert-file": "write --tls-cert FILE",
    "--context-shift": "write --overflow slide",
    "--no-context-shift": "that is the default, --overflow refuse",
    "--keep": "--overflow slide keeps the first message",
    "--slot-save-path": "write --store DIR: prompts are kept and found by their tokens",
    "--sleep-idle-seconds": "write --keep-alive TIME",
    "--models-max": "write --max-loaded N",
    "--models-dir": "name each model with -m [NAME=]FILE",
    **dict.fromkeys(("-cram", "--cache-ram"), "write --max-ram-gb N, of the memory of --store"),
    "--api-prefix": "write --root-path PATH",
    "--lora-scaled": "write --lora NAME=FILE@SCALE",
    "--lora-init-without-apply": "an adapter is a model of its own name, beside the model without it",
    **dict.fromkeys(
        ("-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified"), "all answers share the tokens of -c N"
    ),
    **dict.fromkeys(
        ("--cors-origins", "--cors-methods", "--cors-headers", "--cors-credentials", "--no-cors-credentials"),
        "write --allow SITE; with keys pages of all sites may call",
    ),
    "--no-cache-prompt": "a request says use_kv_cache=false",
    **dict.fromkeys(("-l", "--logit-bias"), "a request says logit_bias"),
    "--ignore-eos": "a request says ignore_eos",
    **dict.fromkeys(("-r", "--reverse-prompt"), "a request says stop"),
    **dict.fromkeys(("--samplers", "--sampler-seq", "--sampling-seq"), "a request says samplers"),
    **dict.fromkeys(
        ("--temp", "--temperature", "--top-k", "--top-p", "--min-p", "--repeat-penalty", "-s", "--seed"),
        "write --sampling temperature=T,top_k=K,seed=N",
    ),
    **{
        option: f"write --sampling {name}=X"
        for option, name in {
            "--presence-penalty": "presence_penalty",
            "--frequency-penalty": "frequency_penalty",
            "--typical": "typical_p",
            "--typical-p": "typical_p",
            "--top-nsigma": "top_n_sigma",
            "--top-n-sigma": "top_n_sigma",
            "--xtc-probability": "xtc_probability",
            "--xtc-threshold": "xtc_threshold",
            "--dry-multiplier": "dry_multiplier",
            "--dry-base": "dry_base",
            "--dry-allowed-length": "dry_allowed_length",
            "--dry-penalty-last-n": "dry_penalty_last_n",
            "--dynatemp-range": "dynatemp_range",
            "--dynatemp-exp": "dynatemp_exponent",
            "--mirostat": "mirostat",
            "--mirostat-lr": "mirostat_eta",
            "--mirostat-ent": "mirostat_tau",
            "--adaptive-target": "adaptive_target",
            "--adaptive-decay": "adaptive_decay",
        }.items()
    },
    "--reasoning-format": "thoughts are told apart, as reasoning_content",
    "--reasoning-effort": """write --chat-template-kwargs '{"reasoning_effort": "low"}'""",
    "--media-path": "a request brings its images itself",
    "--log-disable": "llama.cpp's log is shown with --verbose only",
    **dict.fromkeys(("-lv", "--verbosity", "--log-verbosity"), "write --verbose for llama.cpp's log"),
    "--log-file": "write 2> FILE",
    "--no-jinja": "--chat-format NAME is a format without a template",
    "--no-mmproj": "give -m the model's file: no encoder is then looked for",
}

ABSENT = frozenset(
    (
        *("--cache-list", "-cl", "--completion-bash", "--usage", "--cpu-mask", "-C", "--cpu-range", "-Cr"),
        *("--cpu-strict", "--prio", "--poll", "--cpu-mask-batch", "-Cb", "--cpu-range-batch", "-Crb"),
        *("--cpu-strict-batch", "--prio-batch", "--poll-batch", "--perf", "--no-perf", "-e", "--escape"),
        *("--no-escape", "--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale"),
        *("--yarn-orig-ctx", "--yarn-ext-factor", "--yarn-attn-factor", "--yarn-beta-slow"),
        *("--yarn-beta-fast", "-kvo", "--kv-offload", "-nkvo", "--no-kv-offload", "--repack", "-nr"),
        *("--no-repack", "--no-host", "-dt", "--defrag-thold", "--rpc", "-lm", "--load-mode", "-lzm"),
        *("--lazy-mode", "--numa", "-dev", "--device", "--list-devices", "-ot", "--override-tensor"),
        *("-cmoe", "--cpu-moe", "-ncmoe", "--n-cpu-moe", "-ncffn", "--n-cpu-ffn", "-sm", "--split-mode"),
        *("-ts", "--tensor-split", "-mg", "--main-gpu", "-fitt", "--fit-target", "-fitc", "--fit-ctx"),
        *("--check-tensors", "--override-kv", "--op-offload", "--no-op-offload", "--control-vector"),
        *("--control-vector-scaled", "--control-vector-layer-range", "-bs", "--backend-sampling"),
        *("-lcs", "--lookup-cache-static", "-lcd", "--lookup-cache-dynamic", "--kv-unified-per-slot"),
        *("-cms", "--checkpoint-min-step", "--cache-idle-slots", "--no-cache-idle-slots", "-sp"),
        *("--special", "--warmup", "--no-warmup", "--spm-infill", "--mmproj-offload", "-mmdev"),
        *("--no-mmproj-offload", "--mmproj-device", "--image-min-tokens", "--image-max-tokens"),
        *("--mtmd-batch-max-tokens", "--video-fps", "--video-timestamp-interval", "--video-ffmpeg-dir"),
        *("--tags", "--embd-normalize", "--reuse-port", "--path", "--ui-config", "--webui-config"),
        *("--ui-config-file", "--webui-config-file", "--ui-mcp-proxy", "--webui-mcp-proxy", "--tools"),
        *("--tools-runtime", "--mcp-servers-config", "--mcp-servers-json", "-ag", "--agent", "-no-ag"),
        *("--no-agent", "--sse-ping-interval", "--threads-http", "--props", "--models-preset"),
        *("--models-autoload", "--no-models-autoload", "--reasoning-budget-message", "-sps"),
        *("--reasoning-preserve", "--no-reasoning-preserve", "--skip-chat-parsing", "--log-prompts-dir"),
        *("--no-skip-chat-parsing", "--prefill-assistant", "--no-prefill-assistant", "--log-prefix"),
        *("--slot-prompt-similarity", "--no-log-prefix", "--log-timestamps", "--no-log-timestamps"),
        *("--log-colors", "--spec-draft-hf", "-hfd", "-hfrd", "--hf-repo-draft", "-td", "--threads-draft"),
        *("-tbd", "--threads-batch-draft", "-ctkd", "--cache-type-k-draft", "-ctvd"),
        *("--cache-type-v-draft", "-devd", "--device-draft", "-ngld", "--gpu-layers-draft"),
        *("--n-gpu-layers-draft", "--spec-synth-len", "--spec-synth-rates", "--spec-default"),
        *("--dry-sequence-breaker", "--swa-checkpoints", "--ctx-checkpoints", "-ctxcp"),
    )
)
"""Options of llama.cpp without an equivalent here: a hint at one with a similar name would be wrong."""
