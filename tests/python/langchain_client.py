"""LangChain's `ChatOpenAI` with a bound tool against a running server.

    python langchain_client.py http://127.0.0.1:8000/v1
"""

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def get_weather(city: str) -> str:
    """Get the current weather of a city."""
    return f"sunny in {city}"


def main(base_url: str) -> None:
    model = ChatOpenAI(base_url=base_url, api_key="unused", model="any", temperature=0, max_tokens=512, max_retries=0)
    bound = model.bind_tools([get_weather])
    history = [HumanMessage("What is the weather in Paris?")]
    reply = bound.invoke(history)
    (call,) = reply.tool_calls
    assert call["name"] == "get_weather" and "Paris" in call["args"]["city"], reply
    assert reply.response_metadata["finish_reason"] == "tool_calls", reply
    streamed = None
    for chunk in bound.stream(history):
        streamed = chunk if streamed is None else streamed + chunk
    assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [("get_weather", call["args"])], streamed
    history += [reply, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
    last = bound.invoke(history)
    assert last.usage_metadata["input_tokens"] > reply.usage_metadata["input_tokens"]
    print("ok:", call["args"])


if __name__ == "__main__":
    main(sys.argv[1])
