#!/usr/bin/env bash
# Docker with compose and buildx, from the distribution's packages.
. "$PROVISION_DIR/lib.sh"

apt_update
packages=(docker.io)
# Names differ: Ubuntu has docker-compose-v2; Debian 13 docker-compose (v2) and a
# separate docker-cli; Debian 12 only the old Python docker-compose.
for p in docker-cli docker-buildx; do
	if apt_has "$p"; then packages+=("$p"); fi
done
if apt_has docker-compose-v2; then
	packages+=(docker-compose-v2)
elif [[ $(apt-cache madison docker-compose) =~ '| '\ *2\. ]]; then
	packages+=(docker-compose)
else
	say "NOTE: this release has no compose v2; installing docker-compose 1, without 'docker compose'"
	packages+=(docker-compose)
fi
say "docker: ${packages[*]}"

# Limit the logs, so that the output of a container cannot fill the disk. iptables
# stays enabled: Docker's rules have their own chains, and the guest firewall uses
# DOCKER-USER.
put 644 /etc/docker/daemon.json <<'J'
{
  "iptables": true,
  "log-driver": "json-file",
  "log-opts": {"max-size": "10m", "max-file": "3"}
}
J
# Docker starts containers with the first runc in its PATH. This one makes them trust the
# certificates that the guest trusts.
put 755 /usr/local/sbin/runc <<'X2'
#!/bin/sh
exec /usr/local/bin/agent-guest runc "$@"
X2
apt_install "${packages[@]}"

# Use socket activation: the daemon takes seconds of the boot and 100 MB of memory,
# and many sessions never use it. The first `docker` call starts it. Containers with a
# restart policy start at that call, not at boot.
quiet systemctl disable docker.service containerd.service || true
unit docker.socket
