"""The `anthropic` package of PyPI against a running server.

    python anthropic_client.py http://127.0.0.1:8000

Exits with an error when a call fails or breaks the contract.
"""

import sys

import anthropic

TOOL = {
    "name": "get_weather",
    "description": "Get the current weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
# The package has no parameter for it any more.
GREEDY = {"temperature": 0}
QUESTION = "What is the weather in Paris?"


def main(base_url: str) -> None:
    client = anthropic.Anthropic(base_url=base_url, api_key="unused", max_retries=0, timeout=120)
    model = "any"
    messages = [{"role": "user", "content": "What is 2 + 3?"}]

    counted = client.messages.count_tokens(model=model, messages=messages)
    whole = client.messages.create(model=model, messages=messages, max_tokens=64, extra_body=GREEDY)
    assert whole.type == "message" and whole.stop_reason in ("end_turn", "max_tokens"), whole
    assert whole.usage.input_tokens + whole.usage.cache_read_input_tokens == counted.input_tokens
    assert all(block.type == "text" for block in whole.content), "thinking is off unless it is asked for"
    with client.messages.stream(model=model, messages=messages, max_tokens=64, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "".join(block.text for block in whole.content), (text, whole.content)
    assert final.usage.output_tokens == whole.usage.output_tokens

    thinking = {"type": "enabled", "budget_tokens": 1024}
    thought = client.messages.create(
        model=model, messages=messages, max_tokens=2048, extra_body=GREEDY, thinking=thinking, system="Think first."
    )
    assert thought.content[0].type == "thinking" and thought.content[0].signature, thought
    history = messages + [
        {"role": "assistant", "content": [block.model_dump() for block in thought.content]},
        {"role": "user", "content": "And 3 + 4?"},
    ]
    client.messages.create(model=model, messages=history, max_tokens=32, thinking={"type": "disabled"})
    with client.messages.stream(
        model=model, messages=messages, max_tokens=2048, extra_body=GREEDY, thinking=thinking, system="Think first."
    ) as stream:
        again = stream.get_final_message()
    blocks = lambda message: [(b.type, getattr(b, "thinking", None) or getattr(b, "text", None)) for b in message.content]  # noqa: E731
    assert blocks(again) == blocks(thought), (again, thought)

    history = [{"role": "user", "content": QUESTION}]
    called = client.messages.create(
        model=model, messages=history, max_tokens=512, extra_body=GREEDY, tools=[TOOL], thinking={"type": "adaptive"}
    )
    assert called.stop_reason == "tool_use", called
    (call,) = [block for block in called.content if block.type == "tool_use"]
    assert call.name == "get_weather" and "Paris" in call.input["city"], call
    with client.messages.stream(
        model=model, messages=history, max_tokens=512, extra_body=GREEDY, tools=[TOOL], thinking={"type": "adaptive"}
    ) as stream:
        again = [block.input for block in stream.get_final_message().content if block.type == "tool_use"]
    assert again == [call.input], again
    history += [
        {"role": "assistant", "content": [block.model_dump() for block in called.content]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]},
    ]
    after = client.messages.create(model=model, messages=history, max_tokens=48, tools=[TOOL])
    read = lambda usage: usage.input_tokens + usage.cache_read_input_tokens  # noqa: E731
    assert read(after.usage) > read(called.usage), (after.usage, called.usage)

    try:
        client.messages.create(model=model, messages=messages, max_tokens=10**9)
    except anthropic.BadRequestError as error:
        assert error.body["error"]["type"] == "invalid_request_error", error.body
    else:
        raise AssertionError("an endless reply was not refused")
    print("ok:", repr(text))


if __name__ == "__main__":
    main(sys.argv[1])
