"""The command line: stdout has the text and nothing else, stderr one line, exit codes say what went wrong."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mixedkv import Llama, __version__
from mixedkv.bundled import model_path
from mixedkv.bundled.corpus import make_recall
from mixedkv.cli import main
from mixedkv.config import parse_kv
from mixedkv.kv.stats import format_saving
from mixedkv.model.footprint import footprint, model_shape
from mixedkv.model.gguf_file import read_model_file
from support.models.images import png
from support.models.zoo.projector import write_projector
from support.patience import PATIENCE
from support.servers import prefork

pytestmark = [pytest.mark.full, pytest.mark.by_model]

RECALL = make_recall(seed=53_001, n_sentences=12)  # one that the model answers with an F16 cache
COMMAND = [sys.executable, "-m", "mixedkv"]
ENDLESS = ["run", "--raw", "-p", RECALL.text, "-n", "7800", "--n-ctx", "8192"]
# what that writes does not fit a small pipe: it waits to be read
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "pipesize": 4096, "bufsize": 0}
SUMMARY = re.compile(
    r"prompt ([\d.]+|-), text ([\d.]+|-) tok/s; "
    r"cache [\d.]+ [KMG]iB, [\d.]+ bits/element, \d+% (below|above) F16"
)


def run(*args: str | Path, stdin: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
    done = prefork.run([*map(str, args)], stdin)
    assert done.returncode == code, done.stderr
    return done


def test_run_answers_from_the_bundled_journal() -> None:
    done = run("run")
    assert re.fullmatch(r"[A-Z][^\n]*\.\n", done.stdout)
    (summary,) = done.stderr.splitlines()
    assert SUMMARY.fullmatch(summary)
    assert len(summary) <= 80


@pytest.mark.parametrize("kv", ["mixed", "f16", "q8_0"])
@pytest.mark.core
def test_run_is_the_same_for_each_cache(kv: str) -> None:
    done = run("run", "--raw", "--temp", 0, "-p", RECALL.prompt, "--kv", kv, "-n", 40, "--n-ctx", 512)
    assert done.stdout == RECALL.fact.answer + "\n"


def test_run_reports_the_cache() -> None:
    done = run("run", "Mira", "--kv", "mixed:threshold=64", "-n", 4, "--n-ctx", 512)
    with Llama(model_path(), kv="mixed:threshold=64", n_ctx=512, verbose=False) as llm:
        stats = llm.kv.stats()
    assert f"{stats.bits_per_element:.2f} bits/element, {format_saving(stats.saving)}" in done.stderr


def test_run_with_the_chat_template(tmp_path: Path) -> None:
    question = " ".join(RECALL.journal) + " " + RECALL.fact.question
    (tmp_path / "prompt.txt").write_text(question)
    answers = [
        run("run", "--temp", 0, "-n", 40, "-p", question).stdout,
        run("run", "--temp", 0, "-n", 40, "-f", tmp_path / "prompt.txt").stdout,
        run("run", "--temp", 0, "-n", 40, "-f", "-", stdin=question).stdout,
    ]
    assert answers[0] == answers[1] == answers[2] != "\n"


def test_run_appends_what_is_piped_in_and_a_file(tmp_path: Path) -> None:
    """`cat journal | mixedkv run "Summarise:"`: nothing of it is dropped."""
    journal, question = " ".join(RECALL.journal), RECALL.fact.question
    (tmp_path / "journal.txt").write_text(journal)
    options = ("--temp", 0, "-n", 40)
    whole = run("run", *options, f"{journal}\n\n{question}").stdout
    assert whole == run("run", *options, journal, stdin=question).stdout
    assert whole == run("run", *options, "-p", journal, stdin=question).stdout
    assert whole == run("run", *options, "-f", tmp_path / "journal.txt", stdin=question).stdout
    assert whole != run("run", *options, question).stdout
    assert run("run", *options, stdin=question).stdout == run("run", *options, question).stdout


def test_run_says_that_it_waits_for_a_pipe() -> None:
    with subprocess.Popen(
        [*COMMAND, "run", "Mira", "-n", "1"], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as done:
        assert b"waiting for the end of standard input" in done.stderr.readline()
        done.stdin.close()
        assert done.wait(PATIENCE) == 0


def test_the_demo_does_not_wait_for_a_pipe_that_was_left_open() -> None:
    with subprocess.Popen([*COMMAND, "run"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as done:
        assert b"code" in done.stdout.readline()
        assert done.wait(PATIENCE) == 0


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "picture").write_bytes(b"a\xff\xfe")
    done = run("run", "-f", tmp_path / "picture", code=2)
    assert done.stderr.endswith("picture is not a text in UTF-8 (byte 1): convert it first\n")


@pytest.mark.parametrize(
    ("arguments", "warned"), [(["Hello"], True), ([], False), (["-m", model_path(), "Hello"], False)]
)
def test_the_bundled_model_says_what_it_cannot_do(arguments: list[str], warned: bool) -> None:
    assert ("talks nonsense otherwise" in run("run", "-n", 1, *arguments).stderr) == warned


def test_run_with_another_model_and_a_seed(tmp_path: Path) -> None:
    (tmp_path / "other.gguf").symlink_to(model_path())
    sampled = ["run", "-m", tmp_path / "other.gguf", "--raw", "-p", "On Monday", "--temp", "1", "-n", 20]
    first, second = run(*sampled, "--seed", 0).stdout, run(*sampled, "--seed", 0).stdout
    assert first == second != "\n"
    assert run(*sampled, "--seed", 1).stdout != first


def test_run_shows_the_log_only_when_asked() -> None:
    assert "llama_model_loader" in run("run", "-p", "Mira", "-n", 2, "--n-ctx", 256, "--verbose").stderr


# --- info ---


def test_info_fits_80_columns() -> None:
    lines = run("info").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.split()[:1] == ["mixed:compact"] for line in lines)
    assert any("by formula" in line for line in lines)


def test_info_as_json() -> None:
    report = json.loads(run("info", "--json", "--n-ctx", 4096).stdout)
    assert report["n_ctx"] == 4096
    assert report["computed_by"] == "formula"
    model = report["model"]
    assert (model["architecture"], model["n_layer"], model["n_ctx_train"]) == ("llama", 6, 8192)
    assert model["layers"][5] == {"il": 5, "n_head_kv": 2, "head_size_k": 64, "head_size_v": 64}
    bits = {cache["kv"]: cache["bits_per_element"] for cache in report["caches"]}
    assert (bits["f16"], bits["q8_0"], bits["q4_0"]) == (16, 8.5, 4.5)
    assert bits["mixed:compact"] == pytest.approx(4.5 + 16 * 88 / 4096, abs=1e-3)  # with the ring's padding


@pytest.mark.parametrize("spec", ["f16", "mixed", "mixed:quality", "q8_0"])
@pytest.mark.core
def test_info_says_what_fits(spec: str) -> None:
    report = json.loads(run("info", "--json", "--kv", spec).stdout)
    longest = report["caches"][0]["longest_n_ctx"]
    assert longest == model_shape(read_model_file(model_path())).n_ctx_train  # which fits here
    line = next(line for line in run("info", "--kv", spec).stdout.splitlines() if line.split()[:1] == [spec])
    assert len(line.split()) == 8  # "6.9 MiB" are two


@pytest.mark.parametrize("spec", ["f16", "mixed"])
def test_info_and_a_fitted_llama_say_the_same(
    spec: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compute buffers count in both."""
    room = 40 << 20
    monkeypatch.setattr("mixedkv.context_choice.memory_room", lambda: room)
    assert main(["info", "--json", "--kv", spec]) == 0
    longest = json.loads(capsys.readouterr().out)["caches"][0]["longest_n_ctx"]
    with Llama(model_path(), kv=spec, n_ctx="fit", verbose=False) as llm:
        assert longest == llm.fitted.n_ctx < 8192


def test_info_says_what_serve_would_choose(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mixedkv.context_choice.memory_room", lambda: 5 << 20)
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "`mixedkv serve` takes" in out
    assert "Warning: the weights (4.8 MiB) and what is loaded beside them" in " ".join(out.split())


def test_info_of_sequences_that_share_a_context() -> None:
    kv = ("mixed:quality", "mixed:quality,threshold=2048")
    args = ("info", "--n-ctx", 8192, 32768, "--sequences", 1, 16, "--kv", *kv)
    caches = json.loads(run(*args, "--json").stdout)["caches"]
    bits = {(x["kv"], x["n_ctx"], x["sequences"]): x["bits_per_element"] for x in caches}
    assert len(bits) == 8
    assert bits[kv[0], 8192, 16] <= 1.2 * bits[kv[0], 8192, 1]
    assert kv[1] in run(*args).stdout


def test_info_of_a_budget(tmp_path: Path) -> None:
    """With shares that say so, the bits are where they are needed."""
    shares = {(il, part): float((il, part) == (5, "v")) for il in range(6) for part in "kv"}
    rows = [
        {"test": "sensitivity", "kv": "x", "flash_attn": True, "threads": 1, "n_ctx": 512}
        | {"layer": il, "part": part, "kld_share": share}
        for (il, part), share in shares.items()
    ]
    path = tmp_path / "s.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = ("info", "--n-ctx", 8192, "--kv", "mixed:budget=7.6MiB")
    assert "\n    --kv mixed:cold_k=q5_0,cold_v=lm4\n" in run(*args).stdout + "\n"
    (cache,) = json.loads(run(*args, "--shares", path, "--json").stdout)["caches"]
    assert parse_kv(cache["setting"]).types_of(5)[1] == "q8_0"
    assert cache["bytes"] <= 7.6 * 2**20
    assert len(run("info", "--n-ctx", 2048, 8192, "--kv", "mixed:budget=8MiB").stdout.split("budget")) == 2


@pytest.mark.parametrize("kv", ["f16", "q8_0", "mixed", "mixed:threshold=256,group=32", "mixed:cold_k=q8_0"])
@pytest.mark.parametrize("name", ["llama-64", "llama-128", "gemma2", "lfm2", "refact"])
def test_the_formula_is_what_is_allocated(zoo_path, name: str, kv: str) -> None:
    path = zoo_path(name)
    said = footprint(model_shape(read_model_file(path)), parse_kv(kv), 2048)
    with Llama(path, kv=kv, n_ctx=2048, verbose=False) as llm:
        stats = llm.kv.stats()
    assert stats.n_elements == said.n_elements
    assert stats.bytes_total == pytest.approx(said.bytes, rel=0.05)


def test_words_of_the_context() -> None:
    """Its size, the rows of sliding windows and micro-batches, as they are called elsewhere."""
    done = run("run", "-p", "A journal", "-n", 1, "--fit", "-ub", 64, "--swa-full", "--kv", "mixed")
    assert re.search(r"cache [\d.]+ MiB, [\d.]+ bits/element, \d+% below F16", done.stderr)
    refused = run("run", "-p", "x", "-c", 2**30, "--kv", "f16", code=2).stderr
    assert re.search(r"TiB for the cache, and [\d.]+ GiB are free\. --n-ctx=8192 fits", refused)


# --- what goes wrong ---


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["walk"], "there is no command 'walk': use run, chat"),
        (["run", "-m", "none.gguf", "-p", "x"], "none.gguf: No such file or directory"),
        (["run", "-m", __file__, "-p", "x"], "no GGUF file"),
        (["run", "-m", str(model_path())], "add TEXT or -f FILE"),
        (["run", "-p", ""], "the prompt is empty"),
        (["run", "-p", "x", "-f", "none.txt"], "none.txt: No such file or directory"),
        (["run", "x", "-p", "y"], "not allowed with"),
        (["run", "-f", "none.txt"], "none.txt: No such file or directory"),
        (["run", "--kv", "mixed:threshold=8"], "threshold=8 is smaller than group=16"),
        (["run", "--kv", "q3_k"], "'q3_k' names no cache"),
        (["run", "--n-ctx", "16"], "exceed context window of 256"),
        (["run", "-c", "32kk"], "'32kk' is not a number of tokens"),
        (["run", "-c", "-1"], "'-1' is not a number of tokens: use e.g. 4096 or 32k"),
        (["run", "-c", "99999999", "x"], "80.5 GiB for the cache"),
        (["run", "none.gguf"], "none.gguf: a model of your own needs a prompt"),
        (["run", "x", "y"], "'y' is one argument too many: put quotes around a prompt with spaces"),
        (["run", "-fa", "on", "x"], "there is no -fa: attention over quantised rows is fused"),
        (["run", "-cnv"], "there is no -cnv: `mixedkv chat` is the conversation"),
        (["run", "-no-cnv", "x"], "`mixedkv run` answers once"),
        (["run", "-np", "4", "x"], "there is no -np: that is for `mixedkv serve`"),
        (["run", "--api-key", "abc", "x"], "that is for `mixedkv serve`"),
        (["run", "-sys", "Be brief.", "x"], "`mixedkv chat --system TEXT` has one"),
        (["run", "--no-mmap", "x"], "--stream-layers and --memory say how weights are read"),
        (["run", "--color", "x"], "answers on a terminal have colours"),
        (["run", "--ignore-eos", "x"], "there is no --ignore-eos: llama.cpp has it"),
        (["run", "--jin", "x"], "there is no option --jin (did you mean --jinja?)"),
        (["run", "-tb", "many", "x"], "-tb/--threads-batch: 'many' is not a positive whole number"),
        (["run", "-ctk", "q9_0", "x"], "-ctk/--cache-type-k: 'q9_0' is no type of rows"),
        (
            ["run", "--mmproj", "none.gguf", "--image", "a.png", "x"],
            "--mmproj=none.gguf: there is no such file",
        ),
        (
            ["run", "--image", "a.png", "x"],
            "--image: the model needs an image encoder: give it with --mmproj",
        ),
        (["run", "--lora", "none.gguf", "x"], "none.gguf: No such file or directory"),
        (["run", "--chat-format", "nope", "x"], "--chat-format='nope' is not one of llama-cpp-python's"),
        (["run", "--seed", "x", "hi"], "argument --seed: 'x' is not a whole number"),
        (["run", "--memory", "6", "x"], "there is room for 0 B: raise memory, or lower --n-ctx"),
        (["run", "--memory", "6X", "x"], "'6X' is not a size: use e.g. 2GiB or 500MiB"),
        (["run", "--stream-layers", "some", "x"], "use auto, all, ffn, a number, or keep_first=8"),
        (
            ["run", "--kv", "mixed:budget=100", "x"],
            "--kv='mixed:budget=100': 100 B is too little, the smallest cache takes 336.0 KiB",
        ),
        (["run", "--kv", "mixed:budget=3GX", "x"], "use e.g. 2GiB, or 4.5bit for an element"),
        (["run", "--kv", "mixed:sink=-1", "x"], "(did you mean sinks?)"),
        (["run", "--kv", "mixed:threshold=64,threshold=32", "x"], "gives threshold twice"),
        (["run", "--ctx", "512"], "there is no option --ctx (did you mean --ctx-size?)"),
        (["run", "--temperature", "1"], "there is no option --temperature (did you mean --temp?)"),
        (["run", "--kv", "mixed:balance"], "(did you mean balanced?)"),
        (["run", "--kv", "mixed:cold=q3_k"], "cold='q3_k' is not one of q8_0"),
        (["run", "--kv", "f16", "-ctk", "q8_0"], "give one of them"),
        (["run", "-hf", "model.gguf", "-p", "x"], "write OWNER/REPO"),
        (["chat", "-m", "a.gguf", "b.gguf"], "two models are given, a.gguf and b.gguf"),
        (["chat", "--conversation"], "`mixedkv chat` is the conversation"),
        (["chat", "--hist", "notes"], "there is no option --hist (did you mean --history?)"),
        (["chat", "--max-age", "3x"], "'3x' is not a duration: use e.g. 30d, 12h or 90min"),
        (["chat", "--new"], "--new: there is no --history to forget"),
        (["serve", "--api-key", "secret"], "--api-key: use 16 to 512 printable characters"),
        (["serve", "--api-key", "a" * 20, "--api-key-file", "f"], "--api-key and --api-key-file: give one"),
        (["serve", "--host", "0.0.0.0"], "give --api-key-file, or --allow-no-keys if everybody"),
        (["serve", "--port", "99999"], "--port=99999: use at most 65535"),
        (["serve", "--port", "abc"], "argument --port: 'abc' is not a whole number"),
        (["serve", "-n", "5"], "there is no -n: each request says its max_tokens"),
        (["serve", "-md", "x.gguf"], "there is no -md: write --speculation FILE"),
        (["serve", "--metrics"], "there is no --metrics: it is always there"),
        (["serve", "--ssl-key-file", "k"], "write --tls-key FILE"),
        (["serve", "--cache-reuse", "256"], "write --reuse chunks"),
        (["serve", "--np", "4"], "(did you mean -np?)"),
        (["serve", "--mmproj", "none.gguf"], "--mmproj=none.gguf: there is no such file"),
        (["serve", "--chat-format", "odd"], "give a file, or the name of a format such as chatml"),
        (["serve", "--chat-template", "odd"], "there is no --chat-template: write --chat-format FILE"),
        (["serve", "--temp", "1"], "there is no --temp: write --sampling temperature=T"),
        (["serve", "--sampling", "temp=1"], "--sampling='temp=1': temp: this field is not known"),
        (["serve", "--allow", "localhost:3000"], "give a site with its scheme"),
        (["serve", "--store-remote", "foo"], "use redis://HOST:PORT/DB"),
        (["serve", "--reuse", "all"], "--reuse='all': use exact, prefix, chunks, or chunks:repair"),
        (["serve", "--config", "none.toml"], "none.toml: No such file or directory"),
        (["info", "-c", "x"], "'x' is not a number of tokens"),
        (["run", "--mmproj", "none.gguf", "x"], "--mmproj=none.gguf: there is no such file"),
        (["chat", "--kv", "mixed:balance"], "nor key=value (did you mean balanced?)"),
        (["serve", "--lora", "x=none.gguf"], "--lora=none.gguf: there is no such file"),
        (["serve", "--slots"], "there is no --slots: /v1/stats lists sequences"),
        (["serve", "--context-shift"], "there is no --context-shift: write --overflow slide"),
        (["serve", "--slot-save-path", "x"], "write --store DIR"),
        (["serve", "--sleep-idle-seconds", "60"], "write --keep-alive TIME"),
        (["serve", "--models-max", "2"], "write --max-loaded N"),
        (["serve", "--cache-ram", "99"], "write --max-ram-gb N"),
        (["serve", "--api-prefix", "/a"], "write --root-path PATH"),
        (["serve", "--lora-scaled", "a:2"], "write --lora NAME=FILE@SCALE"),
        (["serve", "--spec-type", "draft-mtp"], "write --speculation prompt-lookup, mtp"),
        (["serve", "-kvu"], "there is no -kvu: all answers share the tokens of -c N"),
        (["serve", "--no-webui"], "the chat page is always there"),
        (["serve", "--presence-penalty", "1"], "write --sampling presence_penalty=X"),
        (["serve", "--temperature", "1"], "write --sampling temperature=T"),
        (["serve", "--cors-origins", "*"], "write --allow SITE"),
        (["serve", "--offline"], "HF_HUB_OFFLINE=1"),
        (["serve", "--poll", "50"], "there is no --poll: llama.cpp has it, and there is nothing like it"),
        (["serve", "--chat-template-kwargs", "{"], "it is no JSON"),
        (["serve", "--chat-template-kwargs", "[]"], "give an object of variables"),
        (["serve", "--chat-template-kwargs", '{"tools": 1}'], "tools is the server's to say"),
        (["serve", "--reasoning", "none"], "use 'auto', 'on' or 'off'"),
        (["serve", "--reasoning-budget", "-2"], "--reasoning-budget=-2: use at least -1"),
        (["info", "--kv", "mixed:balance"], "(did you mean balanced?)"),
        (["pull", "nothing"], "model='nothing' is neither a file nor a name: give a GGUF model, OWNER/REPO"),
        (["cache", "ls"], "the following arguments are required: --store"),
        (["bench", "speeed"], "there is no command 'speeed' (did you mean speed?)"),
        (["serve", "--parralel", "2"], "did you mean --parallel?"),
        (["serve", "--kv", "mixed:balance"], "--kv='mixed:balance': 'balance' is neither a preset"),
        (["run", "-n", "0", "x"], "'0' is not a number of tokens: use 1 or more, or -1 for all"),
        (["run", "--top-k", "-3", "x"], "'-3' is not a whole number of 0 or more"),
        (
            ["run", "-m", "smollm", "x"],
            "--model='smollm' is neither a file nor a name (did you mean smollm2?)",
        ),
        (["run", "-m", "gemma3:q8", "x"], "(did you mean gemma3?)"),
        (["run", "-m", "", "x"], "--model='' is neither a file nor a name"),
        (
            ["run", "-m", "https://x.org/a.gguf", "x"],
            "'https://x.org/a.gguf' is neither a file nor a name, download it",
        ),
        (
            ["run", "-ctk", "mixed", "x"],
            "'mixed' is no type of rows: use f16, q8_0 or q4_0, or --kv mixed for both",
        ),
        (["run", "--kv", "Mixed:Budget=3 GX", "x"], "budget='3 GX' is not a size"),
        (["serve", "--host", "127.0.0.1:8000"], "--host='127.0.0.1:8000': give the port by itself"),
        (
            ["serve", "--host", "no.invalid", "--allow-no-keys"],
            "--host='no.invalid': Name or service not known",
        ),
        (["serve", "--request-timeout", "soon"], "--request-timeout: 'soon' is not a number"),
        (["serve", "--speculation", "eagle"], "--speculation='eagle': use off, prompt-lookup, mtp"),
        (["serve", "--speculation", "mtp"], "--speculation='mtp': recall-5m.q8_0 has no MTP layers"),
        (["serve", "--store-key-file", "k"], "there is nothing to encrypt, give --store-remote or a folder"),
        (["serve", "--store", __file__], "test_cli.py: a folder is needed, this is a file"),
        (["serve", "--lora", "none.gguf@x"], "--lora=none.gguf@x: there is no such file"),
        (["run", "--n-gpu-layers", "-2"], "'-2' is not a number of layers: use 0 or more, or -1 for all"),
        (["run", "--temp", "-1"], "'-1': use a number from 0 to 100"),
        (["run", "--top-p", "2"], "use a number from 0 to 1"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    args: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(args)
    except SystemExit as end:  # argparse's
        code = end.code
    assert code == 2
    out, err = capfd.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("mixedkv: error: ")
    assert message in line


def test_the_command_ends_with_the_code() -> None:
    assert run("walk", code=2).stderr.startswith("mixedkv: error: ")


def test_serve_without_its_extra_names_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pydantic_settings", None)
    for name in ("mixedkv_service.settings", "mixedkv_server.settings"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert main(["serve", "--help"]) == 2
    assert "needs pydantic_settings, which is not installed: pip install 'mixedkv[server]'" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("arguments", "unneeded"),
    [(["--help"], ("mixedkv_bench", "mixedkv_server")), (["serve", "--help"], ("fastapi", "mixedkv.engine"))],
)
def test_help_loads_little(arguments: list[str], unneeded: tuple[str, ...]) -> None:
    program = (
        "import atexit, sys; from mixedkv.cli import main; "
        "atexit.register(lambda: print('LOADED', *sys.modules)); main(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    )
    loaded = done.stdout.rpartition("LOADED")[2].split()
    assert "mixedkv.cli.main" in loaded
    assert not [name for name in loaded if name.startswith(unneeded)]


def test_a_model_without_rows_runs(zoo_path) -> None:
    run("run", "-m", zoo_path("mamba"), "-p", "x", "-n", 1)


@pytest.mark.parametrize("name", ["llama-48", "mamba", "bert"])
def test_unsupported_models_are_one_line_too(zoo_path, name: str) -> None:
    (line,) = run("run", "-m", zoo_path(name), "-p", "x", "--kv", "mixed", code=2).stderr.splitlines()
    assert line.startswith("mixedkv: error: ")
    assert "'f16'" in line


@pytest.mark.needs("POSIX")
def test_ctrl_c() -> None:
    with subprocess.Popen([*COMMAND, *ENDLESS], **PIPES) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert b"Traceback" not in errors


@pytest.mark.needs("POSIX")
def test_a_closed_pipe_ends_quietly() -> None:
    with subprocess.Popen([*COMMAND, *ENDLESS, "-m", str(model_path())], **PIPES) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.wait(PATIENCE), errors) == (0, b"")


def test_version() -> None:
    assert run("--version").stdout.startswith(f"mixedkv {__version__} (llama.cpp ")


def test_help_shows_each_cache() -> None:
    text = run("run", "--help").stdout
    for spec in ("mixed:balanced", "mixed:quality", "mixed:budget=2GiB", "mixed:cold=q8_0,threshold=256"):
        assert spec in " ".join(text.split())


# --- words of other programs ---


def test_words_of_llama_cpp_are_taken(capfd: pytest.CaptureFixture[str]) -> None:
    words = "-ngl 0 -c 1k -t 1 -ctk q8_0 -ctv q8_0 --jinja -n 4 --seed 1"
    assert main(["run", *words.split(), "hello"]) == 0
    assert "8.50 bits/element" in capfd.readouterr().err
    ours = "--n-gpu-layers 0 --n-ctx 1024 --threads 1 --kv q8_0 -n 4 --seed 1"
    assert main(["run", *ours.split(), "hello"]) == 0


def test_a_model_and_a_prompt_may_stand_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "twin.gguf"
    path.symlink_to(model_path())
    question = " ".join(RECALL.journal) + " " + RECALL.fact.question  # whose answer ends
    assert main(["run", str(path), question, "-n", "-1", "-c512", "-tb", "1", "--temp", "0"]) == 0
    assert capfd.readouterr().out == run("run", question, "-n", "99", "-c", "512", "--temp", "0").stdout


def test_images_in_a_prompt_and_a_chat(tmp_path: Path) -> None:
    encoder = write_projector("mlp", int(read_model_file(model_path()).get("embedding_length")), tmp_path)
    (tmp_path / "a.png").write_bytes(png())
    options = ("--mmproj", encoder, "-n", 8, "--temp", 0, "-c", 512)
    told = run("run", *options, "--image", tmp_path / "a.png", "What is this?").stdout
    assert told.strip()
    talk = f"/image {tmp_path / 'a.png'}\nWhat is this?\n/image none.png\n"
    done = run("chat", *options, "--history", tmp_path / "talk", stdin=talk)
    assert done.stdout == told
    assert "none.png: No such file or directory" in done.stderr
    done = run("chat", *options, "--history", tmp_path / "talk", stdin="And now?\n")
    assert re.search(r"3\d from cache", done.stderr)
    done = run("chat", "--history", tmp_path / "talk", stdin="And now?\n", code=2)
    assert "this chat has images: give the model's image encoder with --mmproj FILE" in done.stderr


def test_a_base_model_continues_and_says_so(zoo_path) -> None:
    base = zoo_path("llama-64")
    assert "is a base model: it continues your text" in run("run", base, "x", "-n", 1, "-c", 256).stderr
    refused = run("chat", base, stdin="x\n", code=2).stderr
    assert "not tuned for chat" in refused
    assert "--chat-format chatml" in refused
    run("chat", base, "--chat-format", "chatml", "-n", 4, "-c", 256, stdin="x\n")


def test_a_type_alone_is_of_k_or_v(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-ctk", "q8_0", "-c", "512", "-n", "4", "hello"]) == 0
    assert "12.25 bits/element" in capfd.readouterr().err  # K in 8.5, V in 16


def test_a_model_may_stand_without_its_option(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "twin.gguf"
    path.symlink_to(model_path())
    assert main(["run", str(path), "-p", "hello", "-n", "4", "-c", "512"]) == 0
    assert capfd.readouterr().out
