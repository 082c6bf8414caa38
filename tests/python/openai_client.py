"""The `openai` package of PyPI against a running server.

    python openai_client.py http://127.0.0.1:8000/v1

Exits with an error when a call fails or breaks the contract.
"""

import json
import sys

import openai
import pydantic


def main(base_url: str) -> None:
    client = openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0, timeout=120)
    (model,) = client.models.list().data
    messages = [{"role": "user", "content": "What is the capital of France?"}]

    whole = client.chat.completions.create(model=model.id, messages=messages, max_tokens=48, seed=7)
    assert whole.object == "chat.completion" and whole.model == model.id
    choice = whole.choices[0]
    assert choice.finish_reason in ("stop", "length"), choice
    assert choice.message.role == "assistant"
    assert 0 < whole.usage.completion_tokens <= 48
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    thought = choice.message.model_extra.get("reasoning") or ""

    content, reasoning, finish, usage = "", "", None, None
    stream = client.chat.completions.create(
        model=model.id, messages=messages, max_tokens=48, seed=7, stream=True, stream_options={"include_usage": True}
    )
    for event in stream:
        for part in event.choices:
            content += part.delta.content or ""
            reasoning += part.delta.model_extra.get("reasoning") or ""
            finish = part.finish_reason or finish
        usage = event.usage or usage
    # One prompt and one seed: the same reply, streamed or not.
    assert content == (choice.message.content or ""), (content, choice.message.content)
    assert reasoning == thought, (reasoning, thought)
    assert finish == choice.finish_reason
    assert usage.completion_tokens == whole.usage.completion_tokens

    raw = client.completions.create(model=model.id, prompt="One, two,", max_tokens=8)
    assert raw.object == "text_completion" and raw.usage.completion_tokens <= 8

    log_probabilities(client, model.id, messages)
    tools(client, model.id)
    structured(client, model.id)
    responses(client, model.id)
    refusals(client, model.id, messages)
    print("ok:", repr(thought + content))


TOOL = {
    "name": "get_weather",
    "description": "Get the current weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
QUESTION = "What is the weather in Paris?"


def log_probabilities(client: openai.OpenAI, model: str, messages: list) -> None:
    reply = client.chat.completions.create(
        model=model, messages=messages, max_tokens=8, logprobs=True, top_logprobs=3, reasoning_effort="none"
    )
    told = reply.choices[0].logprobs.content
    assert len(told) == reply.usage.completion_tokens, (len(told), reply.usage)
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 3 for entry in told), told


def tools(client: openai.OpenAI, model: str) -> None:
    """A call, its result, and the reply to it; streamed and not."""
    offer = [{"type": "function", "function": TOOL}]
    history = [{"role": "user", "content": QUESTION}]
    whole = client.chat.completions.create(model=model, messages=history, tools=offer, temperature=0, max_tokens=512)
    (call,) = whole.choices[0].message.tool_calls
    assert whole.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "get_weather" and "Paris" in json.loads(call.function.arguments)["city"], call
    # The package joins the deltas of a stream itself.
    with client.chat.completions.stream(
        model=model, messages=history, tools=offer, temperature=0, max_tokens=512
    ) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls", streamed
    calls = [(c.function.name, c.function.arguments) for c in streamed.message.tool_calls]
    assert calls == [("get_weather", call.function.arguments)], calls
    history.append(whole.choices[0].message.model_dump(exclude_none=True))
    history.append({"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"})
    after = client.chat.completions.create(model=model, messages=history, tools=offer, max_tokens=48)
    assert after.usage.prompt_tokens > whole.usage.prompt_tokens


class Place(pydantic.BaseModel):
    """What the package makes a schema of, and reads the answer into."""

    city: str = pydantic.Field(max_length=24)
    inhabitants: int = pydantic.Field(ge=1, le=50_000_000)
    coastal: bool


class Look(pydantic.BaseModel):
    """Arguments of a strict tool."""

    city: str = pydantic.Field(max_length=24)
    days: int = pydantic.Field(ge=1, le=9)


def structured(client: openai.OpenAI, model: str) -> None:
    """A schema is obeyed, or the reply says that it was not looked at: never silent."""
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    reply = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "The capital of France as JSON."}],
        temperature=0,
        max_tokens=512,
        reasoning_effort="none",
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}},
    )
    if "response_format" in reply.model_extra["tensorfold"].get("ignored", []):
        return
    answer = json.loads(reply.choices[0].message.content)
    assert list(answer) == ["city"] and isinstance(answer["city"], str), answer

    # The package's own types, whole and as a call: what does not fit them raises.
    ask = {"model": model, "temperature": 0, "max_tokens": 400, "reasoning_effort": "none"}
    question = [{"role": "user", "content": "Tell me about Oslo as JSON."}]
    parsed = client.chat.completions.parse(messages=question, response_format=Place, **ask)
    assert isinstance(parsed.choices[0].message.parsed, Place), parsed
    (call,) = client.chat.completions.parse(
        messages=question, tools=[openai.pydantic_function_tool(Look)], tool_choice="required",
        parallel_tool_calls=False, **ask,
    ).choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Look), call
    # The Responses API takes the same types.
    place = client.responses.parse(
        model=model, input="Tell me about Oslo as JSON.", text_format=Place, temperature=0, max_output_tokens=400,
        reasoning={"effort": "none"},
    )
    assert isinstance(place.output_parsed, Place), place
    # What cannot be enforced is refused by its place.
    try:
        client.chat.completions.create(
            messages=question, response_format={"type": "json_schema", "json_schema": {
                "name": "bad", "schema": {"type": "array", "uniqueItems": True}}}, **ask,
        )
    except openai.BadRequestError as error:
        assert "/uniqueItems" in error.message and error.param == "response_format", error
    else:
        raise AssertionError("uniqueItems was passed over in silence")


def responses(client: openai.OpenAI, model: str) -> None:
    """The Responses API: whole, streamed, with a call and the whole history."""
    whole = client.responses.create(model=model, input="What is 2 + 3?", max_output_tokens=400, temperature=0)
    assert whole.status in ("completed", "incomplete"), whole
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    text, last = "", None
    for event in client.responses.create(
        model=model, input="What is 2 + 3?", max_output_tokens=400, temperature=0, stream=True
    ):
        text += event.delta if event.type == "response.output_text.delta" else ""
        last = event
    assert last.type in ("response.completed", "response.incomplete"), last
    assert text == whole.output_text == last.response.output_text, (text, whole.output_text)
    offer = [{"type": "function", "strict": False, **TOOL}, {"type": "web_search"}]
    items = [{"role": "user", "content": QUESTION}]
    called = client.responses.create(model=model, input=items, tools=offer, temperature=0, max_output_tokens=512)
    (call,) = [item for item in called.output if item.type == "function_call"]
    assert call.name == "get_weather" and "Paris" in json.loads(call.arguments)["city"], call
    with client.responses.stream(
        model=model, input=items, tools=offer, temperature=0, max_output_tokens=512
    ) as stream:
        again = [item for item in stream.get_final_response().output if item.type == "function_call"]
    assert [item.arguments for item in again] == [call.arguments], again
    items += [item.model_dump(exclude_none=True) for item in called.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    after = client.responses.create(model=model, input=items, tools=offer, max_output_tokens=48)
    assert after.usage.input_tokens > called.usage.input_tokens


def refusals(client: openai.OpenAI, model: str, messages: list) -> None:
    try:
        client.chat.completions.create(model=model, messages=messages, n=2)
    except openai.BadRequestError as error:
        assert error.param == "n", error
    else:
        raise AssertionError("n=2 was not refused")
    try:
        client.chat.completions.create(model=model, messages=messages, max_tokens=10**9)
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded", error
    else:
        raise AssertionError("an endless reply was not refused")


if __name__ == "__main__":
    main(sys.argv[1])
