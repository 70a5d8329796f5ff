"""Turns requests into sequences, and refuses those that this engine could not serve or that would break a step for others."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from cluster.engine.prefix_chain import PrefixChain
from cluster.engine.sequence import Sequence
from cluster.errors import ContextTooLong, InvalidRequest
from cluster.kv_layout import KVLayout
from cluster.prefix import root_key
from cluster.types import Request


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What an engine runs, and its bounds on requests."""

    checkpoint: str  # fingerprint of the weights' files and the model's config
    domain: str  # numerics domain of the KV it computes
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_model_len: int
    prefix_caching: bool
    shares_generated: bool = True  # prompts may share KV of tokens that were generated here


class SequenceFactory:
    """Makes the sequences of one engine."""

    def __init__(self, identity: EngineIdentity, layout: KVLayout, num_blocks: int) -> None:
        self._identity = identity
        self._layout = layout
        self._num_blocks = num_blocks

    def make(self, request: Request, *, domain: str, stops_at_first_token: bool) -> Sequence:
        """A waiting sequence.

        Args:
            request: from the wire.
            domain: in which the prompt's KV is computed.
            stops_at_first_token: whether it ends here with the prompt.

        Raises:
            InvalidRequest: a field that a step could not survive.
            ContextTooLong: the sequence could never be held.
        """
        self._check(request)
        max_num_tokens = min(request.num_prompt_tokens + request.sampling.max_tokens, self._identity.max_model_len)
        # the KV of the last token is never computed
        num_held_tokens = request.num_prompt_tokens if stops_at_first_token else max_num_tokens - 1
        max_num_blocks = self._layout.num_blocks_for(num_held_tokens)
        if max_num_blocks > self._num_blocks:
            message = f"{num_held_tokens} tokens need {max_num_blocks} KV blocks, the worker has {self._num_blocks}"
            raise ContextTooLong(message, param="max_tokens")
        return Sequence(
            request,
            max_num_tokens=max_num_tokens,
            max_num_blocks=max_num_blocks,
            stops_at_first_token=stops_at_first_token,
            prefix=self._prefix_chain(request, domain) if self._identity.prefix_caching else None,
        )

    def check_first_token(self, sequence: Sequence, token_id: int) -> None:
        """Whether decoding can go on behind `token_id`, which another engine computed.

        Raises:
            InvalidRequest: it is out of the vocabulary, is not the one that an earlier attempt began with, or ends the sequence.
        """
        self._check_vocabulary([token_id], "first_token")
        generated = sequence.request.generated_token_ids
        if generated:
            if generated[0] != token_id:
                raise InvalidRequest(f"{sequence.key}: an earlier attempt began with {generated[0]}, not {token_id}", param="first_token")
        elif sequence.finish_reason_for(token_id, self._identity.eos_token_ids) is not None:
            raise InvalidRequest(f"{sequence.key}: its first token ends it, there is nothing to decode", param="first_token")

    def _check_vocabulary(self, token_ids: Seq[int], param: str) -> None:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._identity.vocab_size):
            raise InvalidRequest(f"token ids must be in [0, {self._identity.vocab_size})", param=param)

    def _check(self, request: Request) -> None:
        sampling = request.sampling
        if not request.prompt_token_ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if sampling.max_tokens < 1:
            raise InvalidRequest("must be at least 1", param="max_tokens")
        if request.num_prompt_tokens >= self._identity.max_model_len:
            message = f"a prompt of {request.num_prompt_tokens} tokens leaves no room in a context of {self._identity.max_model_len}"
            raise ContextTooLong(message, param="prompt")
        if len(request.generated_token_ids) >= sampling.max_tokens:
            message = f"{len(request.generated_token_ids)} tokens leave nothing of max_tokens ({sampling.max_tokens}) to generate"
            raise InvalidRequest(message, param="generated_token_ids")
        self._check_vocabulary(request.prompt_token_ids, "prompt")
        self._check_vocabulary(request.generated_token_ids, "generated_token_ids")
        self._check_vocabulary(sampling.stop_token_ids, "stop_token_ids")
        self._check_vocabulary([token_id for token_id, _ in sampling.logit_bias], "logit_bias")

    def _prefix_chain(self, request: Request, domain: str) -> PrefixChain:
        """Promise P1: what this engine computes after a prompt of another domain belongs to neither domain, so it gets no keys."""
        root = root_key(checkpoint=self._identity.checkpoint, domain=domain, cache_salt=request.cache_salt)
        max_tokens = None if domain == self._identity.domain else request.num_prompt_tokens
        return PrefixChain(root, self._layout.block_size, max_tokens)
