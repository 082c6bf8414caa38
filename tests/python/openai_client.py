"""The `openai` package of PyPI against a running server.

    python openai_client.py http://127.0.0.1:8000/v1

Exits with an error when a call fails or breaks the contract.
"""

import sys

import openai


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

    try:
        client.chat.completions.create(model=model.id, messages=messages, n=2)
    except openai.BadRequestError as error:
        assert error.param == "n", error
    else:
        raise AssertionError("n=2 was not refused")
    try:
        client.chat.completions.create(model=model.id, messages=messages, max_tokens=10**9)
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded", error
    else:
        raise AssertionError("an endless reply was not refused")
    print("ok:", repr(thought + content))


if __name__ == "__main__":
    main(sys.argv[1])
