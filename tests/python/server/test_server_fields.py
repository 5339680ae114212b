"""docs/openai-fields.md says of each field of OpenAI's API what the server does with it."""

from __future__ import annotations

import re
from typing import Any

import openai
import pytest
from pydantic import ValidationError

from api_fields import ENDPOINTS, fields, page
from support import REPOSITORY

pytestmark = pytest.mark.full

PAGE = (REPOSITORY / "docs" / "openai-fields.md").read_text()
LEAST: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/embeddings": {"input": "a"},
}
ASKING: dict[str, Any] = {"best_of": 2, "modalities": ["audio"], "top_logprobs": 1, "background": True}


def test_the_page_is_up_to_date() -> None:
    if f"`openai` {openai.__version__} " not in PAGE:
        pytest.skip("the page is about another version of openai")
    assert "\n".join(page()).rstrip() + "\n" == PAGE


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_what_is_refused_is_refused(endpoint: str) -> None:
    model = ENDPOINTS[endpoint][1]
    refused = [name for name, state in fields(endpoint).items() if state in ("refused", "not known")]
    for name in refused:
        with pytest.raises(ValidationError, match=name):
            model.model_validate({**LEAST[endpoint], name: ASKING.get(name, "x")})
    model.model_validate(LEAST[endpoint])
    assert all(re.search(rf"(refused|not known) \|.*`{name}`", PAGE) for name in refused)
