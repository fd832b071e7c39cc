"""What both of OpenAI's completion endpoints take, and the plain one: fields about tokens, stops and streams.

Fields that would change the answer and are not supported are refused by name; other unknown fields are ignored, as the
API's clients expect.

Not here: conversations (chat), what is answered (answers).
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

from coordinator import limits
from coordinator.apis.json_body import List, Strict, parse_body, refuse_unsupported
from coordinator.errors import BadRequest, OutOfRange, Unsupported
from coordinator.request import check_one
from coordinator.sampling import Wanted

_B = TypeVar("_B", bound="Body")

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")

# Fields that change the answer and are not supported -> the values that change nothing.
_REFUSALS: dict[str, tuple[object, ...]] = {
    "use_beam_search": (None, False),
    "best_of": (None, 1),
    "prompt_logprobs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "structured_outputs": (None,),
}
_COMPLETION_REFUSALS: dict[str, tuple[object, ...]] = {"echo": (None, False), "suffix": (None, "")}


class StreamOptions(Strict):
    """How a stream is sent."""

    include_usage: bool | None = None


class Body(Strict):
    """What both endpoints have."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None  # the newer name
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # an extension, as the next two
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    min_tokens: int | None = None  # an extension, as the next
    ignore_eos: bool | None = None
    stop: str | List[str] | None = None
    stop_token_ids: List[int] | None = None  # an extension
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def most_tokens(self) -> tuple[int | None, str]:
        """The greatest number of tokens, and the name of the field that says so."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens, "max_completion_tokens"
        return self.max_tokens, "max_tokens"

    def wanted(self) -> Wanted:
        """How tokens are to be drawn."""
        return Wanted(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias={_token_id(key): bias for key, bias in (self.logit_bias or {}).items()},
            min_tokens=self.min_tokens,
        )

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


def _token_id(key: str) -> int:
    """Keys of JSON objects are strings; only one spelling, so that no token has two biases."""
    if not _TOKEN_ID.fullmatch(key):
        raise BadRequest("the keys of logit_bias are token ids", param="logit_bias")
    return int(key)


class CompletionBody(Body):
    """POST /v1/completions."""

    prompt: str | List[int] | List[str] | List[List[int]]
    logprobs: int | None = None

    def one_prompt(self) -> str | list[int]:
        """The prompt; lists of one are opened."""
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise Unsupported("one prompt per request", param="prompt")
            return prompt[0]
        return prompt  # type: ignore[return-value]  # a list whose first entry is an id is a list of ids


def parse_completion(value: dict[str, Any]) -> CompletionBody:
    """The body of /v1/completions."""
    return parse_common(CompletionBody, value, _COMPLETION_REFUSALS)


def parse_common(kind: type[_B], value: dict[str, Any], refusals: dict[str, tuple[object, ...]]) -> _B:
    """A body with the fields of both endpoints."""
    refuse_unsupported(value, _REFUSALS | refusals)
    biases = value.get("logit_bias")
    if isinstance(biases, dict) and len(biases) > limits.LOGIT_BIASES:  # before they are looked at
        raise OutOfRange(f"at most {limits.LOGIT_BIASES} tokens may have a bias", param="logit_bias")
    body = parse_body(kind, value)
    if body.n is not None:
        check_one(body.n, "n")
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options needs stream", param="stream_options")
    return body
