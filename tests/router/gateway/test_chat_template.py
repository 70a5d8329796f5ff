"""Rendered chats and prompts against `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from cluster.errors import ConfigError, InvalidRequest
from router.gateway.chat_template import ChatTemplate
from router.gateway.tokenizer import Tokenizer
from tests.router.gateway.tokenizers_in_code import SMOLLM_TEMPLATE, byte_level, write_folder

LLAMA_LIKE = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
<<SYS>>{{ system }}<</SYS>>
{% for message in messages %}
    {% if message['role'] not in ['user', 'assistant'] %}{{ raise_exception('only user and assistant') }}{% endif %}
[{{ message.role|upper }}] {{ message.content|tojson }}{% if loop.last %}{% break %}{% endif %}
{% generation %}x{{ message.content|length }}{% endgeneration %}
{% endfor %}
{% if add_generation_prompt %}[ASSISTANT]{% endif %}
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
"""
NAMESPACED = """{% set state = namespace(count=0) %}{% for m in messages %}{% set state.count = state.count + 1 %}
  {% if m.name is defined %}{{ m.name }}: {% endif %}{{ state.count }}|{{ m['content'] }}{{ eos_token }}{% endfor %}{{ tools is none }}"""

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "  Be brief. "}, {"role": "user", "content": "<b>\"naïve\" & 'café'</b>\n東京 🙂"}],
    [
        {"role": "user", "content": "one", "name": "Ada"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "{{ 7 * 7 }} {% raw %}"},
    ],
]


@pytest.mark.parametrize("template", [SMOLLM_TEMPLATE, LLAMA_LIKE, NAMESPACED], ids=["smollm", "llama-like", "namespaced"])
@pytest.mark.parametrize("messages", CHATS)
async def test_chat_ids_equal_those_of_transformers(tmp_path: Path, template: str, messages: list[dict[str, str]]) -> None:
    from transformers import AutoTokenizer

    write_folder(tmp_path, byte_level(), template=template)
    oracle: Any = AutoTokenizer.from_pretrained(tmp_path)
    variables: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": False})
    for extra in variables:
        expected = oracle.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False, **extra)
        assert await Tokenizer.load(tmp_path).encode_chat(messages, extra) == expected


@pytest.mark.parametrize("settings", [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}])
@pytest.mark.parametrize("single", ["$A", "<|im_start|> $A", "<|im_start|> $A <|im_end|>"])
async def test_prompt_ids_equal_those_of_transformers(tmp_path: Path, single: str, settings: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    raw = Tokenizer.load(write_folder(tmp_path, byte_level()))._raw
    raw.post_processor = TemplateProcessing(single=single, special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)])
    write_folder(tmp_path, raw, **settings)
    for text in ("The capital of France", "<|im_end|> 東京", " "):
        expected = AutoTokenizer.from_pretrained(tmp_path)(text).input_ids
        assert await Tokenizer.load(tmp_path).encode_prompt(text) == expected


async def test_long_texts_are_encoded_alike_off_the_loop(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, byte_level()))
    text = "The capital of France is Paris. " * 2000
    assert await tokenizer.encode_prompt(text) == byte_level().encode(text).ids


def test_a_template_file_beside_the_tokenizer_wins(tmp_path: Path) -> None:
    write_folder(tmp_path, byte_level(), template=None)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer._template is not None
    assert tokenizer._template.render([{"role": "user", "content": "hi"}]) == "hi"


async def test_a_model_without_template_refuses_chats(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        await Tokenizer.load(write_folder(tmp_path, byte_level(), template=None)).encode_chat(CHATS[0])


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception('roles must alternate') }}", "{{ messages[0].content + 1 }}", "{{ 1 / 0 }}", "{{ messages.append(1) }}",
     "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages[7].content }}"],
)  # fmt: skip
def test_a_template_that_fails_is_the_requests_fault(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source, {}).render(CHATS[0])
    assert caught.value.param == "messages"


def test_a_template_that_does_not_compile_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        Tokenizer.load(write_folder(tmp_path, byte_level(), template="{% for %}"))


def test_broken_tokenizer_files_stop_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="broken"):
        Tokenizer.load(tmp_path)
