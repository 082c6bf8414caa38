//! The fields of every request body.

use super::{Body, Field, Kind};

const ANY_INTEGER: Kind = Kind::Integer(i64::MIN, i64::MAX);
const FROM_ZERO: Kind = Kind::Integer(0, i64::MAX);
const ANY_NUMBER: Kind = Kind::Number(f64::NEG_INFINITY, f64::INFINITY);
const IDS: Kind = Kind::List(&Kind::Integer(0, u32::MAX as i64));
const OBJECTS: Kind = Kind::List(&Kind::Object);
const CHOICE: Kind = Kind::Any(&[Kind::Names(&["auto", "none", "required"]), Kind::Object]);

const fn field(name: &'static str, kind: Kind, default: &'static str, note: &'static str) -> Field {
    Field { name, kind, default, note }
}

const SAMPLING: [Field; 5] = [
    field("temperature", ANY_NUMBER, "1", "Divides the logits; 0 and below: the most likely token."),
    field("top_p", ANY_NUMBER, "0.95", "Keeps the smallest set of tokens with this probability."),
    field("top_k", ANY_INTEGER, "20", "Keeps so many tokens; 0: all."),
    field(
        "min_p",
        Kind::Number(0.0, 1.0),
        "0",
        "Keeps tokens with this share of the best one's probability.",
    ),
    field(
        "seed",
        Kind::Integer(i64::MIN, i64::MAX),
        "from the prompt's token ids",
        "Key of the noise: the same request gives the same reply.",
    ),
];

const COMMON: [Field; 20] = [
    field("model", Kind::Text, "the served name", "Any name; `@POLICY` at its end chooses a draft policy."),
    field(
        "max_tokens",
        FROM_ZERO,
        "the server's, cut to what the context leaves",
        "Most tokens of the reply; 0: as absent.",
    ),
    field("max_completion_tokens", FROM_ZERO, "", "The same; `max_tokens` wins."),
    field("stream", Kind::Flag, "false", "The reply comes as server-sent events."),
    field("stream_options", Kind::Object, "", "`include_usage`: the last event carries `usage`."),
    field(
        "stop",
        Kind::Any(&[Kind::Text, Kind::List(&Kind::Text)]),
        "",
        "Strings that end the visible answer; they are not part of it.",
    ),
    field("n", Kind::Integer(1, 1), "1", "A request gives one reply."),
    field("ignore_eos", Kind::Flag, "false", "Generate to the budget."),
    field("draft", Kind::Flag, "true", "`false`: one token a round. The reply is the same."),
    field("tf_policy", Kind::Text, "auto", "Draft policy. The reply is the same."),
    field("tf_knobs", Kind::Object, "{}", "Settings of plugins for this request."),
    field("priority", Kind::Any(&[Kind::Text, ANY_INTEGER]), "", "`\"background\"`: behind other requests."),
    field("return_token_ids", Kind::Flag, "false", "Lists the reply's ids as `tensorfold.token_ids`."),
    field("logit_bias", Kind::Object, "", "Without effect."),
    field(
        "response_format",
        Kind::Object,
        "",
        "Form of the answer: `text`, `json_object`, or `json_schema` with its schema. Without the plugin structured-output \
         this and the next five are named in `tensorfold.ignored`.",
    ),
    field(
        "guided_json",
        Kind::Any(&[Kind::Object, Kind::Text, Kind::Flag]),
        "",
        "The answer is JSON under this schema; `true`: any object.",
    ),
    field("guided_regex", Kind::Text, "", "The whole answer matches this."),
    field("guided_choice", Kind::List(&Kind::Text), "", "The answer is one of these."),
    field("guided_grammar", Kind::Text, "", "The answer follows this EBNF; it begins with the rule `root`."),
    field(
        "structured_outputs",
        Kind::Object,
        "",
        "The same under vLLM's names: one of `json`, `json_object`, `regex`, `choice`, `grammar`.",
    ),
];

const CHAT_FIELDS: [Field; 9] = [
    field(
        "messages",
        OBJECTS,
        "",
        "The conversation: roles `system`, `developer`, `user`, `assistant`, `tool`.",
    ),
    field("tools", OBJECTS, "", "Function tools."),
    field("tool_choice", CHOICE, "auto", "Whether, or which, tool is to be called."),
    field("parallel_tool_calls", Kind::Flag, "true", "`false`: at most one call."),
    field(
        "reasoning_effort",
        Kind::Names(&["none", "minimal", "low", "medium", "high", "xhigh", "max"]),
        "the server's",
        "How much the model thinks; `none` and `minimal`: not at all.",
    ),
    field("thinking_budget", FROM_ZERO, "none", "Tokens of reasoning after which it is ended."),
    field(
        "chat_template_kwargs",
        Kind::Object,
        "",
        "Variables of the chat template: `enable_thinking`, `clear_thinking`, ...",
    ),
    field(
        "logprobs",
        Kind::Flag,
        "false",
        "Tells the log probability of every token, over the whole vocabulary.",
    ),
    field("top_logprobs", Kind::Integer(0, 20), "0", "And of so many alternatives; needs `logprobs`."),
];

const TEXT_FIELDS: [Field; 3] = [
    field("prompt", Kind::Any(&[Kind::Text, IDS]), "", "A string, or token ids as they are."),
    field("add_special_tokens", Kind::Flag, "true", "Without effect: nothing is put before raw text."),
    field(
        "logprobs",
        Kind::Integer(0, 20),
        "none",
        "Tells the log probability of every token and of so many alternatives.",
    ),
];

/// `/v1/chat/completions`.
pub static CHAT: Body =
    Body { name: "ChatCompletion", required: &["messages"], fields: &[&CHAT_FIELDS, &COMMON, &SAMPLING] };

/// `/v1/completions`.
pub static TEXT: Body =
    Body { name: "Completion", required: &["prompt"], fields: &[&TEXT_FIELDS, &COMMON, &SAMPLING] };

/// `/tokenize`.
pub static TOKENIZE: Body = Body {
    name: "Tokenize",
    required: &[],
    fields: &[&[
        field("prompt", Kind::Text, "", "Raw text; control tokens in it count."),
        field("messages", OBJECTS, "", "A conversation, rendered as a chat completion renders it."),
        field("tools", OBJECTS, "", "Its tools."),
        field("reasoning_effort", Kind::Text, "", "As in a chat completion."),
        field("chat_template_kwargs", Kind::Object, "", "As in a chat completion."),
        field("add_special_tokens", Kind::Flag, "true", "Without effect."),
    ]],
};

/// `/detokenize`.
pub static DETOKENIZE: Body = Body {
    name: "Detokenize",
    required: &["tokens"],
    fields: &[&[field("tokens", IDS, "", "Token ids inside the vocabulary.")]],
};

/// `/v1/responses`.
pub static RESPONSES: Body = Body {
    name: "Response",
    required: &["input"],
    fields: &[&[
        field("input", Kind::Any(&[Kind::Text, OBJECTS]), "", "A text, or the whole history as items."),
        field("instructions", Kind::Text, "", "System text before the input."),
        field("model", Kind::Text, "the served name", "Any name."),
        field("max_output_tokens", FROM_ZERO, "the server's", "Most tokens of the reply."),
        field("stream", Kind::Flag, "false", "The reply comes as named server-sent events."),
        field("tools", OBJECTS, "", "Function tools; others are left out and named in a header."),
        field("tool_choice", CHOICE, "auto", "Whether, or which, tool is to be called."),
        field("parallel_tool_calls", Kind::Flag, "true", "`false`: at most one call."),
        field("reasoning", Kind::Object, "", "`effort`: none, minimal, low, medium, high, xhigh, max."),
        field("text", Kind::Object, "", "`format`: the answer's form."),
        field(
            "include",
            Kind::List(&Kind::Text),
            "",
            "`reasoning.encrypted_content`, `message.output_text.logprobs`.",
        ),
        field("top_logprobs", Kind::Integer(0, 20), "0", "Alternatives whose log probabilities are told."),
        field("temperature", ANY_NUMBER, "1", "As in a chat completion."),
        field("top_p", ANY_NUMBER, "0.95", "As in a chat completion."),
        field("metadata", Kind::Object, "{}", "Repeated in the reply."),
    ]],
};

const MESSAGES_FIELDS: [Field; 6] = [
    field("messages", OBJECTS, "", "The conversation: roles `user`, `assistant`, `system`; text or blocks."),
    field("system", Kind::Any(&[Kind::Text, OBJECTS]), "", "System text, whole or in blocks."),
    field("tools", OBJECTS, "", "Tools with an `input_schema`; others are left out and named in a header."),
    field("tool_choice", Kind::Object, "", "`type`: auto, any, tool, none; `disable_parallel_tool_use`."),
    field(
        "thinking",
        Kind::Object,
        "off",
        "`type`: enabled (with `budget_tokens`), adaptive, between_tools, disabled.",
    ),
    field("output_config", Kind::Object, "", "`effort`: low, medium, high, xhigh, max."),
];

/// `/v1/messages`.
pub static MESSAGES: Body = Body {
    name: "Message",
    required: &["messages"],
    fields: &[
        &MESSAGES_FIELDS,
        &[
            field("model", Kind::Text, "the served name", "Any name."),
            field("max_tokens", FROM_ZERO, "the server's", "Most tokens of the reply."),
            field("stop_sequences", Kind::List(&Kind::Text), "", "Strings that end the answer."),
            field("stream", Kind::Flag, "false", "The reply comes as named server-sent events."),
            field("temperature", ANY_NUMBER, "1", "As in a chat completion."),
            field("top_p", ANY_NUMBER, "0.95", "As in a chat completion."),
            field("top_k", ANY_INTEGER, "20", "As in a chat completion."),
        ],
    ],
};

/// `/v1/messages/count_tokens`.
pub static COUNT_TOKENS: Body =
    Body { name: "CountTokens", required: &["messages"], fields: &[&MESSAGES_FIELDS] };
