#!/usr/bin/env bash
# The coding agents and the CLI of dev containers, from the npm registry.
. "$PROVISION_DIR/lib.sh"

say "Claude Code $CLAUDE_CODE_VERSION, Codex $CODEX_VERSION, @devcontainers/cli $DEVCONTAINERS_VERSION"
npm_global "@anthropic-ai/claude-code@$CLAUDE_CODE_VERSION" "@openai/codex@$CODEX_VERSION" "@devcontainers/cli@$DEVCONTAINERS_VERSION"
# npm records the registry's URLs here. They belong to this run, not to the image.
rm -rf /usr/local/lib/node_modules/.package-lock.json /root/.npm
