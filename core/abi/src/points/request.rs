//! Chains around a request on rank 0: its body, its prompt, its stream and its reply.

use crate::{KnobValue, List, Maybe, Slice, Text, TextBuf};

crate::interface! {
    /// A request body, parsed once. Paths are JSON pointers; values cross as JSON text of just what is asked for.
    "document", 0: Document, DocumentObject, DocumentTable {
        /// JSON of a value; nothing when there is none.
        fn get(&self, path: Text<'_>) -> Maybe<TextBuf>;
        /// Kind of a value: "null", "bool", "number", "string", "array", "object", or empty when there is none.
        fn kind(&self, path: Text<'_>) -> TextBuf;
        /// Length of an array, object or string; 0 otherwise.
        fn len(&self, path: Text<'_>) -> u32;
        /// Sets a value (its parent must exist).
        fn set(&self, path: Text<'_>, json: Text<'_>) -> ();
        /// Removes a value.
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
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// Name, by which the plugin finds it again.
    pub name: TextBuf,
    /// The bytes.
    pub bytes: List<u8>,
}

crate::interface! {
    /// A link of the `request` chain.
    "request", 0: RequestLink, RequestLinkObject, RequestLinkTable {
        /// `request.rewrite`: changes the body; doing it twice changes nothing more.
        fn rewrite(&self, body: &DocumentObject) -> () = Ok(());
        /// `request.check`: refuses before anything runs.
        fn check(&self, body: &DocumentObject, knobs: Slice<'_, KnobValue>) -> Maybe<Refusal> = Ok(Maybe::RNone);
        /// `request.prepare`: attachments for all ranks, once the prompt's ids are known.
        fn prepare(&self, body: &DocumentObject, ids: Slice<'_, u32>) -> List<Attachment> = Ok(List::new());
        /// `request.gate`: refuses while the server is not fit to serve.
        fn gate(&self) -> Maybe<Refusal> = Ok(Maybe::RNone);
    }
}

crate::interface! {
    /// A link of the `prompt` chain.
    "prompt", 0: PromptLink, PromptLinkObject, PromptLinkTable {
        /// Variables of the chat template that the request left open: a JSON object to edit.
        fn variables(&self, body: &DocumentObject, variables: &mut TextBuf) -> () = Ok(());
        /// The rendered text.
        fn text(&self, body: &DocumentObject, text: &mut TextBuf) -> () = Ok(());
        /// The ids.
        fn ids(&self, body: &DocumentObject, ids: &mut List<u32>) -> () = Ok(());
    }
}

/// A piece of a reply on its way out.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq, Eq)]
pub struct StreamPiece {
    /// Visible text that may go out.
    pub text: TextBuf,
    /// Reasoning that may go out.
    pub reasoning: TextBuf,
    /// Bytes at the end of `text` that must wait for more.
    pub hold: u32,
    /// Whether the reply ends here.
    pub stop: bool,
}

crate::interface! {
    /// A link of the `stream` chain; one object serves one request.
    "stream", 0: StreamLink, StreamLinkObject, StreamLinkTable {
        /// A reply begins.
        fn begin(&self, request: u64, body: &DocumentObject) -> () = Ok(());
        /// Changes a piece.
        fn piece(&self, request: u64, piece: &mut StreamPiece) -> ();
        /// The reply is over.
        fn end(&self, request: u64) -> () = Ok(());
    }
}

/// A tool call of a reply.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// Function.
    pub name: TextBuf,
    /// Arguments, a JSON object.
    pub arguments: TextBuf,
}

/// A finished reply.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Text as the model wrote it.
    pub raw: TextBuf,
    /// Visible text.
    pub text: TextBuf,
    /// Reasoning.
    pub reasoning: TextBuf,
    /// Calls.
    pub calls: List<ToolCall>,
    /// "stop", "length" or "tool_calls".
    pub finish: TextBuf,
    /// Further fields of the `tensorfold` block, a JSON object.
    pub fields: TextBuf,
}

crate::interface! {
    /// A link of the `reply` chain.
    "reply", 0: ReplyLink, ReplyLinkObject, ReplyLinkTable {
        /// `reply.repair`: mends text before it is parsed.
        fn repair(&self, body: &DocumentObject, reply: &mut Reply) -> () = Ok(());
        /// `reply.parse`: finds calls.
        fn parse(&self, body: &DocumentObject, reply: &mut Reply) -> () = Ok(());
        /// `reply.finish`: reason and fields.
        fn finish(&self, body: &DocumentObject, reply: &mut Reply) -> () = Ok(());
    }
}
