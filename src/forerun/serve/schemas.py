"""What a request may hold. A field that is not here is refused by name; a null is the same as leaving it out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator, model_validator

INT64 = 2**63
MOST_CHOICES = 128
MOST_LOGPROBS = 20
MOST_STOPS = 16
MOST_TOKENS = 2**31 - 1
MOST_TOOLS = 128
MOST_ITEMS = 2**16  # turns of a chat, prompts of a request
AT_ONCE = 2**16  # token ids that are looked at before another thread may go on
FEW_BIASES = 1024  # of more than that, wrong ones are looked for here: a complaint takes more than an item does


def _in_pieces(values: Any, validate: Callable[[Any], Any]) -> Any:
    """Pydantic looks at a list in one go, and nobody else goes on meanwhile."""
    if not isinstance(values, list) or len(values) <= AT_ONCE:
        return validate(values)
    try:
        for start in range(0, len(values), AT_ONCE):
            validate(values[start : start + AT_ONCE])
    except ValidationError:
        return validate(values)  # which says where
    return values


def _biases(biases: Any, validate: Callable[[Any], Any]) -> Any:
    """Of many biases the first that is none is complained of, if there is one, and not a million of them."""
    if not isinstance(biases, dict) or len(biases) <= FEW_BIASES:
        return validate(biases)
    for token, bias in biases.items():
        if not (token.isdecimal() and len(token) <= 10 and type(bias) in (int, float) and -100 <= bias <= 100):
            validate({token: bias})
            return validate(biases)
    return {token: float(bias) for token, bias in biases.items()}


# Of a list the first wrong item is all that is complained of: a complaint takes more time and memory than an item does.
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True), WrapValidator(_in_pieces)]
Count = Annotated[int, Field(ge=1, le=MOST_CHOICES)]
NewTokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Prompt = Annotated[str, Field(min_length=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Choices = Annotated[list[Prompt], Field(min_length=1, max_length=1000)]


class RequestBody(BaseModel):
    """Nothing is ignored, and nothing is converted: "1" is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field(cls, body: Any) -> Any:
        """Of fields that are not here the first is complained of, however many there are."""
        if not isinstance(body, dict) or len(body) <= len(cls.model_fields):
            return body
        names = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next((name for name in body if name not in names), None)
        return {name: value for name, value in body.items() if name in names or name == unknown}


class StreamOptions(RequestBody):
    """Of OpenAI, and vLLM's `continuous_usage_stats`."""

    include_usage: bool | None = Field(None, description="A last chunk without choices tells the usage.")
    continuous_usage_stats: bool | None = Field(None, description="Every chunk tells the usage so far.")


class Speculation(RequestBody):
    """How this request is drafted for. None of it changes the law of the text."""

    enabled: bool | None = Field(None, description="False decodes this request plainly, beside others that draft.")
    max_draft_tokens: int | None = Field(None, ge=0, le=1024, description="At most so many tokens a draft.")
    drafter: str | None = Field(None, description="Must be the server's own, as /v1/models names it.")
    origins: bool | None = Field(None, description="Every choice and chunk tells where each token came from.")


class JsonSchema(RequestBody):
    """Of `response_format`."""

    name: Annotated[str, Field(max_length=64)]
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="Any JSON value unless given.")
    description: str | None = None
    strict: bool | None = Field(None, description="The schema is always kept to.")


class ResponseFormat(RequestBody):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_is_of_its_type(self) -> ResponseFormat:
        if self.json_schema is not None and self.type != "json_schema":
            raise ValueError(
                f"response_format: type {self.type} has no schema: say type: json_schema, or leave json_schema out"
            )
        return self


class StructuredOutputs(RequestBody):
    """What the text must be, as vLLM says it since 0.12; before that each had a field of its own, `guided_json` say."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="A JSON schema.")
    regex: Prompt | None = None
    choice: Choices | None = None
    grammar: Prompt | None = Field(None, description="In Lark's notation.")
    json_object: Literal[True] | None = Field(None, description="Any JSON object.")

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        asked_kinds = [kind for kind, _ in self.asked()]
        if len(asked_kinds) != 1:
            kinds = ", ".join(field.alias or name for name, field in type(self).model_fields.items())
            raise ValueError(
                f"structured_outputs must hold one of {kinds}, not {' and '.join(asked_kinds) or 'none of them'}"
            )
        return self

    def asked(self) -> list[tuple[str, Any]]:
        """What is given, by the names that a request has for it."""
        named = ((field.alias or name, getattr(self, name)) for name, field in type(self).model_fields.items())
        return [(kind, value) for kind, value in named if value is not None]


class TextPart(RequestBody):
    """The only kind of content there is."""

    type: Literal["text"]
    text: str


class Prediction(RequestBody):
    """What the answer is expected to be, such as a file that is to be changed in a few places."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]


class Generation(RequestBody):
    """What chats and completions share."""

    model: str | None = Field(None, description="As /v1/models names it.")
    n: Count | None = Field(None, description="Sequences for each prompt.")
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = Field(None, description="1 unless given; 0 is greedy.")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[Annotated[str, Field(pattern=r"^\d{1,10}$")], Bias] | None, WrapValidator(_biases)] = (
        None
    )
    max_tokens: NewTokens | None = None
    user: str | None = Field(None, description="A label of the client's own; it changes nothing.")
    # As in vLLM
    top_k: Annotated[int, Field(ge=-1, le=MOST_TOKENS)] | None = Field(None, description="0 and -1: no limit.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=1024)] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = Field(None, description="A JSON schema.")
    guided_regex: Prompt | None = None
    guided_choice: Choices | None = None
    guided_grammar: Prompt | None = Field(None, description="In Lark's notation.")
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = Field(None, description="Drafted from as long as it comes true; changes no law.")
    # Ours
    speculation: Speculation | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self


class CompletionBody(Generation):
    """`POST /v1/completions`."""

    prompt: (
        Prompt
        | Annotated[list[Prompt], Field(min_length=1, max_length=MOST_ITEMS, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(max_length=MOST_ITEMS, fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = Field(
        None, description="16 unless given, as in OpenAI's API; 0 only with echo."
    )
    best_of: Count | None = Field(None, description="Decode so many and return the n most likely.")
    echo: bool | None = Field(None, description="Return the prompt in front, with its log-probabilities if asked for.")
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    suffix: Literal[""] | None = Field(None, description="Not offered: models here only continue.")


class Function(RequestBody):
    """A tool that the model may ask its client to call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of an object; none unless given.")
    strict: bool | None = Field(None, description="The schema is always kept to.")


class Tool(RequestBody):
    """The only kind of tool there is."""

    type: Literal["function"]
    function: Function


class FunctionName(RequestBody):
    """Of the tool that must be called."""

    name: str


class NamedTool(RequestBody):
    """A `tool_choice`: this one must be called."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(RequestBody):
    """What an earlier answer called, as it was told."""

    name: str
    arguments: Annotated[str, Field(description="A JSON object, as text.")]


class EarlierCall(RequestBody):
    """Of an earlier answer."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(RequestBody):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[EarlierCall], Field(min_length=1, fail_fast=True)] | None = Field(
        None, description="Of an assistant."
    )
    tool_call_id: str | None = Field(None, description="Of a tool: whose call it answers.")
    # What OpenAI's clients write of an answer when they send it back, where there is nothing in it.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _fits_the_role(self) -> Message:
        if self.content is None and self.tool_calls is None:
            raise ValueError("content is missing: only an assistant's turn with tool_calls may be without")
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError(f"tool_calls are an assistant's, not of role {self.role}")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id and the role tool need each other")
        return self


Tools = Annotated[list[Tool], Field(max_length=MOST_TOOLS)]


class ChatBody(Generation):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_ITEMS, fail_fast=True)]
    max_completion_tokens: NewTokens | None = Field(
        None, description="Up to the context's end unless given, or 4096 where it has none."
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: Tools | None = Field(None, description="What the model may ask its client to call.")
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description="Whether it may, must, or must call this one; auto where there are tools."
    )
    parallel_tool_calls: bool | None = Field(None, description="False: at most one call an answer.")

    @model_validator(mode="after")
    def _agree(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens differ: give one of them")
        return self


class TokenizeBody(RequestBody):
    """`POST /tokenize`: a text, or a chat as the model reads it."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_ITEMS, fail_fast=True)] | None = None
    tools: Tools | None = Field(None, description="Of a chat.")
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages, one of them")
        if self.messages is not None and self.add_special_tokens is not None:
            raise ValueError("add_special_tokens is for a prompt: a chat template brings its own")
        if self.tools is not None and self.messages is None:
            raise ValueError("tools are for messages")
        return self


class DetokenizeBody(RequestBody):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds
