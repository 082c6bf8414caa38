//! Chains around a request on rank 0: its body, its prompt, its stream and its reply.

use crate::{KnobValue, List, Maybe, Slice, Text, TextBuf};

crate::interface! {
    /// A request body in the words of a (chat) completion, whatever dialect it came in, parsed once. Paths are JSON pointers;
    /// the empty one is the whole body. Values cross as JSON text of just what is asked for. Only `request.rewrite` may change
    /// it, within the server's bounds on size and depth; elsewhere `set` and `remove` are errors.
    "document", 0: Document, DocumentObject, DocumentTable {
        /// JSON of a value; nothing when there is none.
        fn get(&self, path: Text<'_>) -> Maybe<TextBuf>;
        /// Kind of a value: "null", "bool", "number", "string", "array", "object", or empty when there is none.
        fn kind(&self, path: Text<'_>) -> TextBuf;
        /// Items of an array or object, bytes of a string; 0 otherwise.
        fn len(&self, path: Text<'_>) -> u32;
        /// Sets a value. Its parent must exist; in an array the place after the last item, or `-`, appends.
        fn set(&self, path: Text<'_>, json: Text<'_>) -> ();
        /// Removes a value; nothing happens when there is none.
        fn remove(&self, path: Text<'_>) -> ();
    }
}

/// A refusal that the client sees.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// HTTP status, 400 to 599.
    pub status: u16,
    /// What is wrong, with the limit and the mend.
    pub message: TextBuf,
    /// Machine-readable code; empty for none.
    pub code: TextBuf,
    /// Field at fault; empty for none.
    pub param: TextBuf,
}

/// Bytes of a plugin that travel with a request to all ranks.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Attachment {
    /// Name, by which the plugin finds it again.
    pub name: TextBuf,
    /// The bytes.
    pub bytes: List<u8>,
}

crate::interface! {
    /// A link of the `request` chain. One object serves all requests. An error or a panic ends the request that it was called
    /// for: HTTP 400 for [`crate::OpError::invalid`], 500 otherwise, with the plugin's name.
    "request", 0: RequestLink, RequestLinkObject, RequestLinkTable {
        /// `request.rewrite`: changes the body before anything else reads it; doing it twice changes nothing more. Also of
        /// requests that only count their tokens.
        fn rewrite(&self, body: &DocumentObject) -> () = Ok(());
        /// `request.check`: refuses once all fields were read, before the prompt is rendered. `knobs` are those of the request,
        /// by number.
        fn check(&self, body: &DocumentObject, knobs: Slice<'_, KnobValue>) -> Maybe<Refusal> = Ok(Maybe::RNone);
        /// `request.prepare`: attachments for all ranks, once the prompt's ids are known. Names are unique in a request.
        fn prepare(&self, body: &DocumentObject, ids: Slice<'_, u32>) -> List<Attachment> = Ok(List::new());
        /// Fields of a body that it obeys: what the server itself would name in `tensorfold.ignored`. Asked once.
        fn fields(&self) -> List<TextBuf> = Ok(List::new());
        /// `request.gate`: refuses while the server is not fit to serve.
        fn gate(&self) -> Maybe<Refusal> = Ok(Maybe::RNone);
    }
}

crate::interface! {
    /// The checkpoint's tokenizer, as a prompt link sees it.
    "tokenizer", 0: Tokenizer, TokenizerObject, TokenizerTable {
        /// Ids of a text. `guard` is the character (a Unicode scalar value) that stands in every control token that a client
        /// wrote, and is left out of what is encoded; 0: there is none.
        fn encode(&self, text: Text<'_>, guard: u32) -> List<u32>;
        /// The control tokens, in the order of the checkpoint's list.
        fn controls(&self) -> List<ControlToken>;
        /// Why texts cannot be encoded in parts that are cut behind control tokens, whatever these are; empty when they can.
        fn uncut(&self) -> TextBuf;
    }
}

/// A token that the tokenizer finds in a text before it does anything else.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq, Eq)]
pub struct ControlToken {
    /// Its text.
    pub text: TextBuf,
    /// Its id.
    pub id: u32,
    /// The checkpoint marks it special: it is no text of a reply.
    pub special: bool,
    /// It is found in the text as it is: no white space around it belongs to it, and it may stand inside of words.
    pub verbatim: bool,
}

crate::interface! {
    /// A link of the `prompt` chain. One object serves all requests; errors as in the `request` chain.
    "prompt", 0: PromptLink, PromptLinkObject, PromptLinkTable {
        /// The server is about to serve; an error refuses the start. Gives ids that end replies beside the checkpoint's own.
        fn start(&self, tokenizer: &TokenizerObject) -> List<u32> = Ok(List::new());
        /// All ids that end replies, once every link has given its own; before any request.
        fn ends(&self, ids: Slice<'_, u32>) -> () = Ok(());
        /// Variables of the chat template: a JSON object with what the request gave, before the server fills in its own
        /// defaults. `enable_thinking` among them switches the reasoning.
        fn variables(&self, body: &DocumentObject, variables: &mut TextBuf) -> () = Ok(());
        /// The rendered text of a chat. It may hold private-use characters that stand for images, and in control tokens that
        /// a client wrote; they must stay where they are.
        fn text(&self, body: &DocumentObject, text: &mut TextBuf) -> () = Ok(());
        /// Encodes a text in the place of the tokenizer, to exactly the ids that `tokenizer.encode(text, guard)` gives;
        /// nothing leaves it to the next link. The first link that answers is taken.
        fn encode(&self, text: Text<'_>, guard: u32, tokenizer: &TokenizerObject) -> Maybe<List<u32>> = Ok(Maybe::RNone);
        /// The ids, of chats and of raw prompts. The rows of images must stay in a row.
        fn ids(&self, body: &DocumentObject, ids: &mut List<u32>) -> () = Ok(());
    }
}

/// A piece of a reply on its way out.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq, Eq)]
pub struct StreamPiece {
    /// Visible text that may go out, after what this link held back before.
    pub text: TextBuf,
    /// Reasoning that may go out.
    pub reasoning: TextBuf,
    /// Bytes at the end of `text` that must wait for more; they begin the `text` of the next piece. What still waits at a
    /// tool call, or at the end of the reply, goes out as it is.
    pub hold: u32,
    /// Whether the reply ends behind `text`; what is held back is dropped.
    pub stop: bool,
}

crate::interface! {
    /// A link of the `stream` chain. One object serves all requests, told apart by a number; one request's calls come one after
    /// another. Its pieces must not depend on how the same text is cut. Stop strings are searched in what the last link
    /// gives.
    "stream", 0: StreamLink, StreamLinkObject, StreamLinkTable {
        /// A reply begins; before the request runs.
        fn begin(&self, request: u64, body: &DocumentObject) -> () = Ok(());
        /// Changes a piece.
        fn piece(&self, request: u64, piece: &mut StreamPiece) -> ();
        /// The reply is over, whatever ended it; comes once for each `begin` that gave no error.
        fn end(&self, request: u64) -> () = Ok(());
    }
}

/// A tool call of a reply.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// Its id; a link may leave it empty in a call that it adds.
    pub id: TextBuf,
    /// Function.
    pub name: TextBuf,
    /// Arguments, a JSON object.
    pub arguments: TextBuf,
}

/// A finished reply.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Text as the model wrote it, reasoning and markup of calls included.
    pub raw: TextBuf,
    /// Visible text.
    pub text: TextBuf,
    /// Reasoning.
    pub reasoning: TextBuf,
    /// Calls.
    pub calls: List<ToolCall>,
    /// "stop", "length" or "tool_calls".
    pub finish: TextBuf,
    /// Further fields of the `tensorfold` block, a JSON object; empty for none. They add to the server's own and change none.
    pub fields: TextBuf,
    /// What ended it: "token" (one that ends replies), "stop" (a stop string or a stream link), "length" (the budget).
    pub ended: TextBuf,
    /// The last token.
    pub last: Maybe<u32>,
    /// Whether the prompt ended inside of the reasoning.
    pub thinking: bool,
    /// Whether the client gets the reply as a stream: then text and reasoning may be added to at their ends, and nothing of
    /// them can be taken back.
    pub streamed: bool,
}

crate::interface! {
    /// A link of the `reply` chain. One object serves all requests. While one is loaded, markup of calls and all text behind it
    /// wait for the end of a reply with tools.
    "reply", 0: ReplyLink, ReplyLinkObject, ReplyLinkTable {
        /// `reply.repair`: mends `raw`. When a link changed it, the server reads it again, as it reads any reply (stream
        /// links get it as one of another request), for text, reasoning and calls; what they do to these fields is lost then.
        fn repair(&self, body: &DocumentObject, reply: &mut Reply) -> () = Ok(());
        /// `reply.parse`: finds, drops and mends calls and text.
        fn parse(&self, body: &DocumentObject, reply: &mut Reply) -> () = Ok(());
        /// `reply.finish`: the last word on the reason (one of the three), and fields.
        fn finish(&self, body: &DocumentObject, reply: &mut Reply) -> () = Ok(());
    }
}
