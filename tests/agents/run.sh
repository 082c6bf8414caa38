#!/usr/bin/env bash
# Real agents against the scripted server: each changes one word of a file in a folder of its own.
#
#     tests/agents/run.sh            # all of them
#     tests/agents/run.sh codex      # one
#
# Needs node with npm (the agents are npm packages that carry their programs, 900 MB together) and the right to make a
# network namespace: everything runs in one that has only loopback, with an empty home, so nothing outside can be reached
# or changed. PLUGFOLD_AGENTS_RECORD=FOLDER writes the forms of the requests down (see record.mjs); what is in
# tests/fixtures/agents was made so.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
packages=${PLUGFOLD_AGENTS_DIR:-$root/target/agents}
server_port=8122
next_port=8123

if [ "${PLUGFOLD_AGENTS_INSIDE:-}" = "" ]; then
  [ -n "${PLUGFOLD_AGENTS_SERVER:-}" ] || (cd "$root" && cargo build -q --locked -p plugfold-tests --bin scripted-server)
  if [ ! -f "$packages/done" ]; then
    mkdir -p "$packages"
    npm install --prefix "$packages" --no-audit --no-fund \
      opencode-ai@1.18.33 @openai/codex@0.171.0 @anthropic-ai/claude-code@2.1.332
    touch "$packages/done"
  fi
  exec env PLUGFOLD_AGENTS_INSIDE=1 unshare -n -- "$0" "$@"
fi

ip link set lo up
work=$(mktemp -d)
started=()
trap 'kill "${started[@]}" 2>/dev/null; rm -rf "$work"' EXIT
"${PLUGFOLD_AGENTS_SERVER:-$root/target/debug/scripted-server}" "$server_port" >/dev/null &
started+=($!)
until curl -sf "http://127.0.0.1:$server_port/health" >/dev/null; do
  kill -0 "${started[0]}" || { echo "the server has ended"; exit 1; }
done
export PATH="$packages/node_modules/.bin:$PATH"
task="In note.txt replace the word old by new."

# Sets the port that an agent talks to: that of the server, or of a recorder before it.
recorder() {
  port=$server_port
  [ -n "${PLUGFOLD_AGENTS_RECORD:-}" ] || return 0
  port=$next_port
  next_port=$((next_port + 1))
  node "$here/record.mjs" "$port" "$server_port" "$PLUGFOLD_AGENTS_RECORD" "$1" &
  started+=($!)
  until curl -sf "http://127.0.0.1:$port/health" >/dev/null; do
    kill -0 "${started[-1]}" || { echo "the recorder has ended"; exit 1; }
  done
}

folder() {
  export HOME="$work/$1-home"
  unset XDG_CONFIG_HOME XDG_DATA_HOME XDG_CACHE_HOME XDG_STATE_HOME
  mkdir -p "$HOME" "$work/$1"
  cd "$work/$1"
  git init -q .
  echo "an old word" > note.txt
}

run_opencode() {
  folder opencode
  cat > opencode.json <<JSON
{"autoupdate": false, "permission": {"bash": "allow", "edit": "allow"},
 "provider": {"plugfold": {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "http://127.0.0.1:$port/v1"},
  "models": {"scripted": {"tool_call": true, "reasoning": true, "limit": {"context": 131072, "output": 4096}}}}}}
JSON
  OPENCODE_DISABLE_MODELS_FETCH=1 timeout 600 opencode run -m plugfold/scripted "$task" </dev/null
}

run_codex() {
  folder codex
  mkdir -p "$HOME/.codex"
  cat > "$HOME/.codex/config.toml" <<TOML
model = "scripted"
model_provider = "plugfold"
[model_providers.plugfold]
name = "Plugfold"
base_url = "http://127.0.0.1:$port/v1"
wire_api = "responses"
env_key = "PLUGFOLD_API_KEY"
TOML
  PLUGFOLD_API_KEY=unused timeout 600 codex exec --dangerously-bypass-approvals-and-sandbox "$task" </dev/null
}

run_claude() {
  folder claude
  ANTHROPIC_BASE_URL="http://127.0.0.1:$port" ANTHROPIC_API_KEY=unused ANTHROPIC_MODEL=scripted \
    ANTHROPIC_SMALL_FAST_MODEL=scripted DISABLE_TELEMETRY=1 CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 \
    DISABLE_AUTOUPDATER=1 timeout 600 claude -p "$task" --model scripted --allowedTools "Bash(sed:*)" </dev/null
}

failed=0
for agent in ${@:-opencode codex claude}; do
  echo "== $agent"
  recorder "$agent"
  "run_$agent" >"$work/$agent.log" 2>&1 || echo "it ended with $?"
  if [ "$(cat "$work/$agent/note.txt")" = "an new word" ]; then
    echo "note.txt: changed"
  else
    tail -40 "$work/$agent.log"
    echo "note.txt: not changed"
    failed=1
  fi
done
exit $failed
