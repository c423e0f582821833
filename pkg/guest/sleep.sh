#!/bin/sh
# A machine that is to be saved stops short of its network and of its identity.
# Only a clone of a golden image can: elsewhere both are made by cloud-init.
if [ "${AGENT_SEED-}" != 1 ]; then
  echo 'agent-sessionizer: only a clone of a golden image can be saved, powering off' >/dev/console
  systemctl poweroff --force --no-wall
  exit 1
fi
: >/run/agent-seed/sleep
