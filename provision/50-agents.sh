#!/usr/bin/env bash
# The coding agents, from the npm registry.
. "$PROVISION_DIR/lib.sh"

say "Claude Code $CLAUDE_CODE_VERSION, Codex $CODEX_VERSION"
npm_global "@anthropic-ai/claude-code@$CLAUDE_CODE_VERSION" "@openai/codex@$CODEX_VERSION"
# npm notes the registry's URLs here; they are this run's, not the image's.
rm -rf /usr/local/lib/node_modules/.package-lock.json /root/.npm
