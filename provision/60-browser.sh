#!/usr/bin/env bash
# The shared libraries of Playwright's browsers. `npx playwright install` downloads
# the browsers themselves for each project.
. "$PROVISION_DIR/lib.sh"

# They take 250 MB: included in Ubuntu guests, optional in images that we build.
if [ "$AGENT_SOURCE" = debian ]; then default=0; else default=1; fi
[ "${AGENT_BROWSER:-$default}" = 1 ] || not_wanted "browser libraries are disabled"

apt_update
# Since the 64-bit time_t transition (Ubuntu 24.04, Debian 13) some names end in t64.
packages=()
for p in libasound2 libatk-bridge2.0-0 libatk1.0-0 libatspi2.0-0 libcups2 libglib2.0-0 libgtk-3-0; do
	if apt_has "${p}t64"; then packages+=("${p}t64"); else packages+=("$p"); fi
done
say "Playwright libraries"
apt_install "${packages[@]}" fonts-liberation fonts-noto-color-emoji \
	libcairo2 libdbus-1-3 libdrm2 libgbm1 libnspr4 libnss3 libpango-1.0-0 libx11-6 \
	libx11-xcb1 libxcb1 libxcomposite1 libxcursor1 libxdamage1 libxext6 libxfixes3 \
	libxi6 libxkbcommon0 libxrandr2 libxrender1 xvfb
