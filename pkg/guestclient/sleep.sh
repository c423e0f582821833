#!/bin/sh
# A machine that will be saved stops before it has a network or an identity. Only a
# clone of a golden image can do that: elsewhere cloud-init creates both.
if [ "${AGENT_SEED-}" != 1 ]; then
  echo 'agent-sessionizer: only a clone of a golden image can be saved, powering off' >/dev/console
  systemctl poweroff --force --no-wall
  exit 1
fi
: >/run/agent-seed/sleep
