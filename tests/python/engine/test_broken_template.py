"""A model whose chat template does not parse can be opened: only its chats fail, and say why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.engine.chat.chat_template import Chat, TemplateOptions
from mixedkv.engine.chat.tokenizer import Tokenizer
from mixedkv.model.gguf_copy import copy_metadata, write_and_close

pytestmark = pytest.mark.full

BROKEN = "{% for message in messages %}\n{{ message.content }}\n{% endif %}"
GOOD = "{% for message in messages %}{{ message.content }}{% endfor %}"
MESSAGES = [{"role": "user", "content": "the lamp"}]
WHY = r"it does not parse: line 3: Encountered unknown tag 'endif'"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llama]:
    path = tmp_path_factory.mktemp("broken") / "broken.gguf"
    write(path)
    with Llama(path, n_ctx=256, verbose=False) as llm:
        yield llm


def write(path: Path) -> None:
    """The bundled model with a template that does not parse."""
    reader, key = gguf.GGUFReader(model_path()), "tokenizer.chat_template"
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    copy_metadata(reader, writer, {key: BROKEN})
    if key not in reader.fields:
        writer.add_string(key, BROKEN)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    write_and_close(writer)


def test_completions_work_and_chats_say_why_not(llm: Llama) -> None:
    assert llm("the lamp", max_tokens=2)["usage"]["completion_tokens"] == 2
    with pytest.raises(ValueError, match=WHY):
        llm.create_chat_completion(messages=MESSAGES, max_tokens=1)
    with pytest.raises(ValueError, match=rf"^messages: the model's chat template refuses them: {WHY}"):
        Tokenizer(llm).encode(MESSAGES)


def test_another_template_or_format_helps(llm: Llama) -> None:
    expected = llm.tokenize(b"the lamp", add_bos=False)
    assert Tokenizer(llm, chat_template=GOOD).encode(MESSAGES)[0][-len(expected) :] == expected
    by_name = Tokenizer(llm, chat_format="chatml")
    assert by_name.encode(MESSAGES)[0]
    begun = Chat(
        messages=[*MESSAGES, {"role": "assistant", "content": "It"}], options=TemplateOptions(continues=True)
    )
    with pytest.raises(ValueError, match=r"^continue_final_message: a chat format by name"):
        by_name.rendered(begun)


def test_a_given_template_that_does_not_parse_is_refused(llm: Llama) -> None:
    with pytest.raises(ValueError, match=rf"^chat_template: {WHY}"):
        Tokenizer(llm, chat_template=BROKEN)
