"""Fields that clients of the OpenAI API send and Baton does not have.

Where silence would change the answer the field is refused by name, unless its value asks for nothing. Fields that only label or bill a
request (`user`, `metadata`, `store`, `service_tier`, `prompt_cache_key`, …) and fields nobody has heard of are ignored, but for those that
are written nearly as one of ours: `max_token` would otherwise let an answer fill the context.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any, Final

from cluster.errors import InvalidRequest

_CLOSE: Final = 0.85  # of difflib's ratio: max_token, temprature; not top_a for top_p, nor spaces_between_special_tokens
_MAX_SPELLED: Final = 64  # unknown fields whose spelling is looked at: a body of 4 MB has room for as many as would hold the gateway up
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


def check_refused_fields(extra: Mapping[str, Any], known: Collection[str]) -> None:
    """
    Args:
        extra: the fields of a request that its schema does not have.
        known: those that it has.

    Raises:
        InvalidRequest: names the first field that would have to be ignored, or that is a slip of the pen.
    """
    for position, (name, value) in enumerate(extra.items()):
        harmless = REFUSED_FIELDS.get(name)
        if harmless is None:
            if position < _MAX_SPELLED:
                _check_spelling(name, known)
        elif not any(type(value) is type(one) and value == one for one in harmless):
            raise InvalidRequest(f"{name}: {_refusal(harmless)}", param=name)


def _check_spelling(name: str, known: Collection[str]) -> None:
    if meant := get_close_matches(name, known, n=1, cutoff=_CLOSE):
        raise InvalidRequest(f"{name}: there is no such field; did you mean {meant[0]}?", param=name)


def _refusal(harmless: Collection[Any]) -> str:
    allowed = [one for one in harmless if one not in _NOTHING]
    other = f" other than {json.dumps(allowed[0])}" if allowed else ""
    return f"is not supported here{other}, and ignoring it would change the answer"
