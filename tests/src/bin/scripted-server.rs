//! A server whose model is scripted, to try clients by hand: `scripted-server [PORT [MILLISECONDS A TOKEN]]`.
//!
//! It calls the shell tool of the agents it knows, to put the word `new` for `old` into `note.txt`, until the prompt holds
//! a tool's result. To anything else it says a few words.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use plugfold::http::{App, HttpSettings, Server};
use plugfold::scripted::{Script, ScriptedService, Step};
use plugfold::text::testing::{text_model, tokenizer};
use plugfold_tests::agents;

const WEATHER: &str = "A tool can do this.</think>Let me do that.<tool_call>get_weather<arg_key>city</arg_key>\
                       <arg_value>Paris</arg_value></tool_call><|observation|>";
const OTHER: &str = "The question is short, and so is the answer. I only have to say something that reads well and takes a \
                     moment to arrive.</think>This is a scripted reply. It says the same to everybody, one token after the \
                     other, so that you can watch it come in.<|endoftext|>";

fn reply(prompt: &str) -> String {
    let weather = prompt.contains("\"get_weather\"") && !prompt.contains("<tool_response>");
    agents::reply(prompt).unwrap_or_else(|| if weather { WEATHER } else { OTHER }.into())
}

fn slowly(script: Script, delay: Duration) -> Script {
    if delay.is_zero() {
        return script;
    }
    script.into_iter().flat_map(|step| [Step::Delay(delay), step]).collect()
}

fn main() -> io::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default: u64| match arguments.next().map(|text| text.parse()) {
        None => Ok(default),
        Some(Ok(number)) => Ok(number),
        Some(Err(_)) => Err(io::Error::other("usage: scripted-server [PORT [MILLISECONDS A TOKEN]]")),
    };
    let port = u16::try_from(number(8001)?).map_err(io::Error::other)?;
    let delay = Duration::from_millis(number(0)?);
    let decoder = tokenizer();
    let engine = ScriptedService::new(ScriptedService::info_for_tests(1 << 20, 4), move |request| {
        let text = decoder.decode(&request.ids);
        slowly(agents::spoken(&text, &reply(&text)), delay)
    });
    engine.remember();
    let text =
        text_model(include_str!("../../fixtures/chat/chat_template.jinja")).map_err(io::Error::other)?;
    let app = Arc::new(App::new(Arc::new(engine), Arc::new(text), HttpSettings::new("scripted")));
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(async {
        let server = Server::bind("127.0.0.1", port).await?;
        println!("serving a script at http://{}", server.address()?);
        server.run(app, std::future::pending()).await
    })
}
