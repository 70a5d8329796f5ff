"""Fields that clients of the OpenAI API send and Baton does not have.

Where silence would change the answer the field is refused by name, unless its value asks for nothing. Fields that only label or bill a
request (`user`, `metadata`, `store`, `service_tier`, `prompt_cache_key`, …) and fields nobody has heard of are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cluster.errors import InvalidRequest

_NOTHING: Final[tuple[Any, ...]] = (None, False, [], {}, "")
# Field → values that ask for nothing.
REFUSED_FIELDS: Final[Mapping[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("tools", "functions", "audio", "prediction", "web_search_options", "moderation", "suffix"), _NOTHING),
    **dict.fromkeys(("echo", "use_beam_search", "continue_final_message", "include_stop_str_in_output", "return_token_ids"), _NOTHING),
    **dict.fromkeys(("prompt_logprobs", "truncate_prompt_tokens", "logits_processors", "bad_words", "allowed_token_ids"), _NOTHING),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), _NOTHING),
    **dict.fromkeys(("max_new_tokens", "max_length", "num_predict", "stop_sequences"), (None,)),  # other systems' words for ours
    **dict.fromkeys(("chat_template", "documents", "mm_processor_kwargs", "kv_transfer_params", "prompt_embeds"), _NOTHING),
    "tool_choice": (None, "none"),
    "function_call": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "n": (None, 1),
    "best_of": (None, 1),
    "reasoning_effort": (None, "none"),
    "verbosity": (None, "medium"),
    "length_penalty": (None, 1),
    "add_generation_prompt": (None, True),
    "add_special_tokens": (None,),
}


def check_refused_fields(extra: Mapping[str, Any]) -> None:
    """
    Args:
        extra: the fields of a request that its schema does not have.

    Raises:
        InvalidRequest: names the first field that would have to be ignored.
    """
    for name, value in extra.items():
        harmless = REFUSED_FIELDS.get(name)
        if harmless is not None and not any(type(value) is type(one) and value == one for one in harmless):
            raise InvalidRequest(f"{name}: is not supported here, and ignoring it would change the answer", param=name)
