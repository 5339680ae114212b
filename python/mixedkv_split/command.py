"""`mixedkv split`: runs a model in two parts, on two machines."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from typing import TYPE_CHECKING, Any

from mixedkv.cli.words import (
    add,
    add_n_predict,
    add_switch,
    naming_the_extra,
    positive,
    temperature,
    whole,
)
from mixedkv.limits import INT32_MAX
from mixedkv_service.options import add_options, read_options

if TYPE_CHECKING:
    from mixedkv_split.client import SplitClient


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Split a model: layers and cache on one machine, embeddings and output head on another."
    )
    parser.epilog = "See docs/split.md."
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_export(commands.add_parser("export", help="write the two files of a model"))
    _add_serve(commands.add_parser("serve", help="serve a body"))
    _add_run(commands.add_parser("run", help="generate text with a head and a server"))


def _add_export(parser: argparse.ArgumentParser) -> None:
    add(parser, "model", "MODEL", "GGUF file")
    add(parser, "head", "HEAD", "file to write, for clients")
    add(parser, "body", "BODY", "file to write, for the server")
    text = "rotate the hidden states, by a rotation made from SEED; both files are then F32"
    add(parser, "--cloak", "SEED", text, int)
    parser.set_defaults(command=run_export)


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add(parser, "body", "BODY", "what `mixedkv split export` wrote for the server")
    with naming_the_extra("split"):
        from mixedkv_split.split_settings import SplitSettings

    parser.epilog = "See docs/split.md."
    add_options(parser, SplitSettings, leave_out=("body",))
    parser.set_defaults(command=run_serve)


def _add_run(parser: argparse.ArgumentParser) -> None:
    add(parser, "head", "HEAD", "what `mixedkv split export` wrote for clients")
    add(parser, "address", "HOST:PORT", "address of the server")
    add(parser, "-p --prompt", "TEXT", "prompt, continued as it is", required=True)
    add_switch(parser, "--chat", "put the prompt into the model's chat template")
    add_n_predict(parser)
    text = "temperature (default: 0, the likeliest token)"
    add(parser, "--temp", "T", text, temperature, default=0.0)
    text = "type of the vectors that are sent (default: f16)"
    parser.add_argument("--precision", choices=("f16", "f32"), default="f16", help=text)
    text = "most draft tokens to send ahead, looked up in the text"
    add(parser, "--draft", "N", text, positive, default=0)
    text = "go on with the last N tokens when the server's context is full (default: 0, the answer ends)"
    add(parser, "--window", "N", text, whole, default=0)
    text = "with --window: also keep the first N tokens (default: 4)"
    add(parser, "--sinks", "N", text, whole, default=4)
    text = "file with the key of a kept session: continue it, and keep it again"
    add(parser, "--session", "FILE", text)
    add(parser, "--key-file", "FILE", "file with the bearer key")
    add_switch(parser, "--tls", "use TLS; each of the next three options implies it")
    text = "PEM file of the authority that signs the server's certificate"
    add(parser, "--ca", "FILE", text, default="")
    add(parser, "--cert", "FILE", "PEM file of the client's certificate", default="")
    add(parser, "--cert-key", "FILE", "PEM file of the key of --cert", default="")
    add(parser, "--threads", "N", "CPU threads of the output head", positive)
    parser.set_defaults(command=run_client)


def run_export(args: argparse.Namespace) -> None:
    from mixedkv_split.export import export

    written = export(args.model, args.head, args.body, args.cloak)
    for path, size in ((written.head, written.head_bytes), (written.body, written.body_bytes)):
        print(f"wrote {path} ({size / 1e6:.1f} MB)")


def run_serve(args: argparse.Namespace) -> None:
    with naming_the_extra("split"):
        from mixedkv.native.llama_cpp import silence_log
        from mixedkv_split.server import serve
        from mixedkv_split.split_settings import SplitSettings

    silence_log()
    logging.basicConfig(format="mixedkv split: %(message)s")
    logging.getLogger("mixedkv").setLevel(logging.INFO)
    serve(read_options(args, SplitSettings))


def run_client(args: argparse.Namespace) -> None:
    with naming_the_extra("split"):
        from mixedkv.native.llama_cpp import silence_log
        from mixedkv_split.client import SplitClient, SplitServerError, tls
        from mixedkv_split.head import Head

    silence_log()
    key = _read_key(args.key_file) if args.key_file else ""
    secure = args.tls or args.ca or args.cert
    credentials = tls(args.ca, args.cert, args.cert_key) if secure else None
    with Head(args.head, n_threads=args.threads) as head:
        try:
            with SplitClient(
                head, args.address, precision=args.precision, key=key, credentials=credentials
            ) as client:
                _generate(client, args)
        except SplitServerError as error:
            raise ValueError(error) from None


def _generate(client: SplitClient, args: argparse.Namespace) -> None:
    from mixedkv_split.session_key import SessionFile

    if args.session and args.chat:
        raise ValueError("--session goes on from a text as it is: leave out --chat")
    prompt: Any = [{"role": "user", "content": args.prompt}] if args.chat else args.prompt
    kept = SessionFile.read(args.session) if args.session else None
    if kept is not None:
        prompt = [*kept.tokens, *client.head.tokenizer.tokenize(args.prompt, start=not kept.tokens)]
    began = time.perf_counter()
    with client.session(kept.key, kept.tokens[: kept.n_kept]) if kept else client.session() as session:
        options = {
            "max_tokens": args.n_predict if args.n_predict > 0 else INT32_MAX,
            "temperature": args.temp,
            "draft": args.draft,
            "window": args.window,
            "sinks": args.sinks,
        }
        for text in session.generate(prompt, **options):
            print(text, end="", flush=True)
        print(flush=True)
        n, seconds = len(session.tokens) + session.n_dropped, time.perf_counter() - began
        print(
            f"{n} tokens in {seconds:.2f} s, {session.n_sent_bytes / n:.0f} bytes a token sent, "
            f"{session.n_received_bytes} received",
            file=sys.stderr,
        )
        if kept is not None:
            session.keep()
            SessionFile(kept.key, session.text_tokens, session.n_kept).write(args.session)


def _read_key(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read().strip()
